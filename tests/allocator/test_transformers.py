"""Models of transformers: warmup_allocator without an example, whose inputs are made from the config, and segments."""

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator

from ..models.zoo import IMAGE, VOCABULARY, batch_with_images, llava, make, transformers
from ..support.same import assert_same
from .traces import everything


def t5(headless=False):
    sizes = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
    config = transformers.T5Config(**sizes, decoder_start_token_id=0)
    return (transformers.T5Model if headless else transformers.T5ForConditionalGeneration)(config)


def clip():
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = {**small, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2}
    vision = {**small, "image_size": 8, "patch_size": 4}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def test_images_of_an_example_are_kept():
    """Tokens that stand for images are not repeated: there must be as many as the images have features."""
    model, seen = llava(), []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    batch = batch_with_images()
    ids = batch["labels"] = batch["input_ids"]
    scheduler = SequenceLengthScheduler(8, 24, duration=10, step_size=8)
    warmup_allocator(model, 24, batch_size=3, example_batch=batch, scheduler=scheduler)
    assert [tuple(call["input_ids"].shape) for call in seen] == [(3, length) for length in (24, 8, 16, 24, 24)]
    for call in seen:
        assert call["labels"].shape == call["attention_mask"].shape == call["input_ids"].shape
        assert call["pixel_values"].equal(batch["pixel_values"][[0, 1, 0]])
        length = min(call["input_ids"].shape[1], 12)
        assert call["input_ids"][:, :length].equal(ids[[0, 1, 0], :length])
        assert (call["input_ids"] == IMAGE).sum(1).tolist() == [4, 4, 4]


MODELS = {
    "causal": lambda: make("gpt2"),
    "encoder-decoder": t5,
    "encoder-decoder, without a head": lambda: t5(headless=True),
    "vision and text": clip,
    "text with images": llava,
}


@pytest.mark.parametrize("name", MODELS)
def test_no_example_is_needed(name):
    model = MODELS[name]()
    optimizer = torch.optim.AdamW(model.parameters())
    before, calls = everything(model, optimizer), []
    handle = model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True)
    scheduler = SequenceLengthScheduler(8, 24, duration=10, step_size=8)
    report = warmup_allocator(model, 24, batch_size=3, optimizer=optimizer, scheduler=scheduler)
    handle.remove()
    assert_same(before, everything(model, optimizer))
    assert report.lengths == (24, 8, 16)
    assert [tuple(call["input_ids"].shape) for call in calls] == [(3, length) for length in (24, 24, 8, 16, 24, 24)]
    assert all(call["attention_mask"].all() and call["input_ids"].min() >= 0 for call in calls)
    assert all(call["input_ids"].max() < VOCABULARY for call in calls)
    assert not any((call["input_ids"] == IMAGE).any() for call in calls if name == "text with images")
    assert {"pixel_values" in call for call in calls} == {name == "vision and text"}
    assert all(call["pixel_values"].shape == (3, 3, 8, 8) for call in calls if "pixel_values" in call)
    has_labels = name not in ("vision and text", "encoder-decoder, without a head")
    assert all(call["labels"].equal(call["input_ids"]) if has_labels else "labels" not in call for call in calls)


def ramp():
    return SequenceLengthScheduler(4, 24, duration=5, step_size=4)


def test_under_segments_one_pass_stands_for_all_lengths():
    """They have one shape."""
    model = make("llama")
    assert warmup_allocator(model, 24, scheduler=ramp(), resize_options={"mode": "segments"}).lengths == (24,)
    assert len(warmup_allocator(model, 24, scheduler=ramp()).lengths) == 6


@pytest.mark.parametrize(
    ("mode", "expected"), [("segments", {(4, None), (24, None)}), ("window", {(None, 3), (None, 23)})]
)
def test_a_length_that_the_model_gets_as_a_number_needs_two(mode, expected):
    seen = set()

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(5, 3)

        def forward(self, ids, segment_length=None, window=None):
            seen.add((segment_length, window))
            return self.embedding(ids)

    batch = {"ids": torch.zeros(1, 24, dtype=torch.long)}
    report = warmup_allocator(Own(), 24, scheduler=ramp(), example_batch=batch, resize_options={"mode": mode})
    assert sorted(report.lengths) == [4, 24]
    assert seen == expected
