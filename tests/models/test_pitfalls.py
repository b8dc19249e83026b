"""Cases in which the conversion could fail silently: each works, or raises an error that names a way out."""

import pytest
import torch
from torch import nn

from seqwarm_kernels import apply_alibi, register_alibi
from seqwarm_kernels.models import surgery
from seqwarm_kernels.models.families.native_alibi import falcon_slopes

from .zoo import FAMILIES, HEADS, VOCABULARY, WIDTH, make, tokens, transformers


def small(name, **options):
    config = getattr(transformers, f"{name}Config")
    return config(**FAMILIES["llama"].options | options)


def affected_tokens(model, position=2, length=20):
    """Return the positions whose outputs change with the token at `position`."""
    ids = tokens(1, length)
    other = ids.clone()
    other[0, position] = 3 + (ids[0, position] - 2) % (VOCABULARY - 3)
    difference = (model.eval()(ids).logits - model(other).logits).abs().amax(-1)[0]
    return (difference > 1e-5).nonzero()[:, 0].tolist()


def test_a_window_that_only_the_mask_has_is_kept():
    config = small("Phimoe", num_hidden_layers=1, sliding_window=4, num_local_experts=2)
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(config)
    assert affected_tokens(model) == [2, 3, 4, 5]
    apply_alibi(model, 64)
    assert affected_tokens(model) == [2, 3, 4, 5]


def test_another_attention_after_the_conversion_is_refused():
    model = make("llama")
    apply_alibi(model, 64)
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention"):
        model(tokens())


def llava(tower="clip_vision_model"):
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8, "patch_size": 4}
    config = transformers.LlavaConfig(
        vision_config={"model_type": tower, "intermediate_size": 16, **vision},
        vision_feature_select_strategy="default" if tower.startswith("clip") else "full",
        text_config={**small("Llama").to_dict(), "model_type": "llama"},
        image_token_id=5,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config)


def with_an_image():
    ids = torch.randint(6, VOCABULARY, (2, 12))
    ids[0, :4], ids[1, 3:7] = 5, 5
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 8, 8)}


@pytest.mark.parametrize("make_batch", [lambda: None, with_an_image, lambda: {"input_ids": tokens(2, 9).clamp(min=6)}])
@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model"])  # SigLIP has an nn.MultiheadAttention
def test_models_of_images_are_verified(make_batch, tower):
    """On text without an example, and on an example with its images as they are."""
    model, seen = llava(tower), []
    model.model.get_image_features = record(model.model.get_image_features, seen)
    batch = make_batch()
    report = apply_alibi(model, 64, example_batch=batch)
    assert len(report.replaced) == 2
    assert report.verification.largest_error < 1e-5
    assert report.verification.cache_error < 1e-5
    assert len(seen) == (1 if batch is not None and "pixel_values" in batch else 0)
    assert not any(hasattr(module, "alibi") and module.alibi for module in model.model.vision_tower.modules())


def record(function, calls):
    def recorded(*args, **kwargs):
        calls.append(args)
        return function(*args, **kwargs)

    return recorded


def test_rotary_embeddings_of_other_parts_are_unchanged():
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "image_size": 8, "patch_size": 2}
    text = small("Llama", num_hidden_layers=1).to_dict()
    config = transformers.LlavaConfig(
        vision_config={"model_type": "pixtral", "intermediate_size": 16, **vision},
        text_config={**text, "model_type": "llama"},
        image_token_index=5,
    )
    model = transformers.LlavaForConditionalGeneration(config)
    report = apply_alibi(model, 64)
    assert [source.path for source in report.removed] == ["model.language_model.rotary_emb"]


def test_rotary_embeddings_shared_with_layers_without_alibi_are_refused():
    model = make("llama")
    model.model.layers[1].self_attn.is_causal = False
    foreign = model.model.layers[1].self_attn
    foreign.__class__ = type("Foreign", (nn.Module,), {"forward": type(foreign).forward})
    with pytest.raises(ValueError, match=r"model\.rotary_emb"):
        apply_alibi(model, 64)


class TwoInputs(nn.Module):
    """The caller passes the positions."""

    def __init__(self):
        super().__init__()
        self.words, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(64, WIDTH)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True), 1)

    def forward(self, input_ids, position_ids):
        return self.layers(self.words(input_ids) + self.positions(position_ids))


def test_positions_from_the_caller_are_found():
    batch = {"input_ids": tokens(2, 9), "position_ids": torch.arange(9).expand(2, -1)}
    with pytest.raises(ValueError, match="positions"):
        apply_alibi(TwoInputs(), 64, example_batch=batch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_faint_positions_are_found(dtype):
    class Faint(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            self.positions = nn.Parameter(0.02 * torch.randn(64, WIDTH))
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True), 1)

        def forward(self, input_ids):
            return self.layers(self.words(input_ids) + self.positions[: input_ids.shape[1]])

    with pytest.raises(ValueError, match="positions"):
        apply_alibi(Faint().to(dtype), 64)


def test_inputs_that_cannot_be_guessed_must_be_passed():
    model = nn.Sequential(nn.Linear(3, WIDTH), nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True))
    with pytest.raises(ValueError, match="example_batch"):
        apply_alibi(model, 64)
    assert apply_alibi(model, 64, example_batch=torch.randn(2, 7, 3)).verification.calls == 1


def test_self_attention_in_the_shape_of_cross_attention_is_found():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
            self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

        def forward(self, input_ids):
            x = self.words(input_ids)
            return self.attention(self.norm(x), self.norm(x), self.norm(x))[0]

    with pytest.raises(ValueError, match="key and value"):
        apply_alibi(Normed(), 64)


def test_a_failing_forward_names_the_way_out():
    model = transformers.GPT2ForSequenceClassification(transformers.GPT2Config(**FAMILIES["gpt2"].options))
    model.config.pad_token_id = None
    with pytest.raises(ValueError, match="example_batch"):
        apply_alibi(model, 64)


def test_padded_example_batches_are_attended_as_they_are():
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    for name in ("bert", "gpt2"):
        report = apply_alibi(make(name), 64, example_batch={"input_ids": tokens(2, 9), "attention_mask": mask})
        assert report.verification.largest_error < 1e-5


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "mistral"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.float32])
def test_dense_masks_are_refused(name, dtype):
    """Those of integers were read as masks of our own: their first row alone, as padding or as packed sequences."""
    model, ids = make(name).eval(), tokens(2, 9)
    apply_alibi(model, 64)
    causal_and_padded = torch.ones(2, 1, 9, 9).tril() * (torch.arange(9) >= 2)
    mask = causal_and_padded.to(dtype)
    if dtype.is_floating_point:
        mask = torch.zeros_like(mask).masked_fill(mask == 0, -torch.inf)
    inner = next(part for part in model.children() if isinstance(part, transformers.PreTrainedModel))
    for call in (lambda: model(ids, attention_mask=mask), lambda: inner(ids, attention_mask=mask)):
        with pytest.raises(ValueError, match="attention_mask"):
            call()


def test_undo_works_with_groups_of_any_size():
    """One group has the same number of parameters as the added group."""
    model = make("gpt2")
    model.spare = nn.Sequential(nn.MultiheadAttention(8, 2))  # never called: the verification fails
    parameters = list(model.parameters())
    groups = [{"params": parameters[2:5]}, {"params": parameters[:2] + parameters[5:]}]
    optimizer = torch.optim.AdamW(groups)
    with pytest.raises(ValueError, match=r"spare\.0"):
        apply_alibi(model, 64, optimizers=optimizer, learn_slopes=True)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, len(parameters) - 3]


def test_a_learning_rate_scheduler_that_is_made_too_early_is_refused():
    model = make("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="group"):
        apply_alibi(model, 64, optimizers=optimizer, learn_slopes=True)
    apply_alibi(model, 64, optimizers=optimizer)


def test_offloaded_models_are_refused():
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(make("llama"), execution_device="cpu")
    with pytest.raises(ValueError, match="offloaded"):
        apply_alibi(model, 64)


def test_a_position_module_in_two_places_is_replaced_in_both(monkeypatch):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding(VOCABULARY, WIDTH)
            self.first = self.second = nn.Embedding(64, WIDTH)
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True), 1)

        def forward(self, input_ids):
            positions = torch.arange(input_ids.shape[1])
            return self.layers(self.words(input_ids) + self.first(positions) + self.second(positions))

    monkeypatch.setattr(surgery, "_converters", dict(surgery._converters))

    @register_alibi(Twice)
    def convert(module, conversion):
        conversion.replace(module.first, surgery.NoPositions())

    model = Twice()
    apply_alibi(model, 64)
    assert model.first is model.second


@pytest.mark.slow
def test_dynamic_graphs_have_no_breaks():
    model = make("gpt2")
    apply_alibi(model, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (12, 20):
        ids = tokens(2, length)
        torch.testing.assert_close(compiled(ids).logits, model(ids).logits)


def test_falcon_slopes_are_rounded_as_it_was_trained():
    slopes = falcon_slopes(12, 8)
    assert slopes[0] == 0.5 * 8**-0.5
    assert slopes[8] == torch.tensor(2**-0.5).bfloat16().item() * 8**-0.5
