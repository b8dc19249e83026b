"""Cases in which the conversion could fail silently: each works, or raises an error that names a way out."""

import pytest
import torch

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.models.families.native_alibi import falcon_slopes

from .zoo import FAMILIES, VOCABULARY, changed_by, converted, llava, make, tokens, transformers


def test_a_window_that_only_the_mask_has_is_kept():
    options = FAMILIES["llama"].options | {"num_hidden_layers": 1, "sliding_window": 4, "num_local_experts": 2}
    torch.manual_seed(0)
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**options)).eval()
    assert changed_by(model, 2) == [2, 3, 4, 5]
    apply_alibi(model, 64)
    assert changed_by(model, 2) == [2, 3, 4, 5]


def test_another_attention_after_the_conversion_is_refused():
    model = converted("llama")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="attention"):
        model(tokens())


def with_an_image():
    ids = torch.randint(6, VOCABULARY, (2, 12))
    ids[0, :4], ids[1, 3:7] = 5, 5
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 8, 8)}


@pytest.mark.parametrize(
    ("tower", "make_batch"),
    [
        ("clip_vision_model", lambda: None),
        ("siglip_vision_model", with_an_image),  # SigLIP has an nn.MultiheadAttention
        ("siglip_vision_model", lambda: {"input_ids": tokens(2, 9).clamp(min=6)}),
    ],
)
def test_models_of_images_are_verified(make_batch, tower):
    """On text without an example, and on an example with its images as they are."""
    model, seen = llava(tower), []
    model.model.vision_tower.register_forward_hook(lambda *_: seen.append(1))
    batch = make_batch()
    report = apply_alibi(model, 64, example_batch=batch)
    assert len(report.replaced) == 2
    assert report.verification.largest_error < 1e-5
    assert report.verification.cache_error < 1e-5
    assert len(seen) == (1 if batch is not None and "pixel_values" in batch else 0)
    assert not any(hasattr(module, "alibi") and module.alibi for module in model.model.vision_tower.modules())


def test_rotary_embeddings_of_other_parts_are_unchanged():
    report = apply_alibi(llava("pixtral"), 64)
    assert [source.path for source in report.removed] == ["model.language_model.rotary_emb"]


def test_padded_example_batches_are_attended_as_they_are():
    mask = torch.ones(2, 9, dtype=torch.int64)
    mask[1, :4] = 0
    for name in ("bert", "gpt2"):
        report = apply_alibi(make(name), 64, example_batch={"input_ids": tokens(2, 9), "attention_mask": mask})
        assert report.verification.largest_error < 1e-5


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("gpt2", torch.int8), ("bert", torch.float32), ("mistral", torch.int64)],
)
def test_dense_masks_are_refused(name, dtype):
    """Those of integers were read as masks of our own: their first row alone, as padding or as packed sequences."""
    model, ids = converted(name), tokens(2, 9)
    causal_and_padded = torch.ones(2, 1, 9, 9).tril() * (torch.arange(9) >= 2)
    mask = causal_and_padded.to(dtype)
    if dtype.is_floating_point:
        mask = torch.zeros_like(mask).masked_fill(mask == 0, -torch.inf)
    inner = next(part for part in model.children() if isinstance(part, transformers.PreTrainedModel))
    for call in (model, inner):
        with pytest.raises(ValueError, match="attention_mask"):
            call(ids, attention_mask=mask)


def test_a_learning_rate_scheduler_that_is_made_too_early_is_refused():
    model = make("gpt2")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    with pytest.raises(ValueError, match="group"):
        apply_alibi(model, 64, optimizers=optimizer, learn_slopes=True)
    apply_alibi(model, 64, optimizers=optimizer)


def test_falcon_slopes_are_rounded_as_it_was_trained():
    slopes = falcon_slopes(12, 8)
    assert slopes[0] == 0.5 * 8**-0.5
    assert slopes[8] == torch.tensor(2**-0.5).bfloat16().item() * 8**-0.5
