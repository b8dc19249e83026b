"""warmup_allocator(model, max_len) without an example, for models of transformers: inputs are made from the config."""

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.utils.modules import guess_batch
from tests.allocator.traces import assert_same, everything

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def gpt2():
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    )


def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL))


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=1))


def t5(headless=False):
    config = transformers.T5Config(
        vocab_size=50, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return (transformers.T5Model if headless else transformers.T5ForConditionalGeneration)(config)


def bart():
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=50,
            d_model=16,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
        )
    )


def clip():
    vision = {key: value for key, value in SMALL.items() if key != "vocab_size"}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config={**SMALL, "max_position_embeddings": 32, "eos_token_id": 2},
            vision_config={**vision, "image_size": 8, "patch_size": 4},
            projection_dim=8,
        )
    )


def llava():
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    vision |= {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4}
    text = {"model_type": "llama", "vocab_size": 50, "hidden_size": 16, "num_attention_heads": 2}
    text |= {"num_hidden_layers": 1, "intermediate_size": 16}
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_id=5, image_seq_length=4)
    return transformers.LlavaForConditionalGeneration(config)


def test_guessed_tokens_stand_for_no_images():
    guessed = guess_batch(llava(), 20, 24, torch.device("cpu"))
    assert guessed.keys() == {"input_ids", "attention_mask", "labels"}
    assert not (guessed["input_ids"] == 5).any()


def test_images_of_an_example_are_kept():
    """Tokens that stand for images are not repeated: there must be as many as the images have features."""
    model, seen = llava(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    ids = torch.randint(6, 50, (2, 12))
    ids[0, :4], ids[1, 3:7] = 5, 5
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    batch["pixel_values"] = torch.randn(2, 3, 8, 8)
    scheduler = SequenceLengthScheduler(8, 24, duration=10, step_size=8)
    warmup_allocator(model, 24, batch_size=3, example_batch=batch, scheduler=scheduler)
    assert [tuple(call["input_ids"].shape) for call in seen] == [(3, 24), (3, 8), (3, 16), (3, 24)]
    for call in seen:
        assert call["labels"].shape == call["attention_mask"].shape == call["input_ids"].shape
        assert call["pixel_values"].equal(batch["pixel_values"][[0, 1, 0]])
        length = min(call["input_ids"].shape[1], 12)
        assert call["input_ids"][:, :length].equal(ids[[0, 1, 0], :length])
        assert (call["input_ids"] == 5).sum(1).tolist() == [4, 4, 4]


MODELS = {
    "causal": gpt2,
    "causal, grouped heads": llama,
    "masked": bert,
    "encoder-decoder": t5,
    "encoder-decoder, without a head": lambda: t5(headless=True),
    "encoder-decoder with positions": bart,
    "vision and text": clip,
    "text with images": llava,
}


@pytest.mark.parametrize("name", MODELS)
def test_no_example_is_needed(name):
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    before = everything(model, optimizer)
    shapes = []
    handle = model.register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append({key: tuple(value.shape) for key, value in kwargs.items()}),
        with_kwargs=True,
    )
    scheduler = SequenceLengthScheduler(8, 24, duration=10, step_size=8)
    report = warmup_allocator(model, 24, batch_size=3, optimizer=optimizer, scheduler=scheduler)
    handle.remove()
    assert_same(before, everything(model, optimizer))
    assert report.lengths == (24, 8, 16)
    assert [shape["input_ids"] for shape in shapes] == [(3, 24), (3, 24), (3, 8), (3, 16), (3, 24)]
    assert ("pixel_values" in shapes[0]) == (name == "vision and text")
    assert shapes[2].get("pixel_values", (3, 3, 8, 8)) == (3, 3, 8, 8)
    assert ("labels" in shapes[0]) == (name not in ("vision and text", "encoder-decoder, without a head"))


def test_checkpointed():
    model = gpt2()
    model.gradient_checkpointing_enable()
    before = everything(model)
    assert warmup_allocator(model, 24, batch_size=2, accumulation_steps=3).lengths == (24,)
    assert_same(before, everything(model))
