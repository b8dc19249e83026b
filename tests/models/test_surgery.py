"""Changes and report of apply_alibi, and the undo after an error."""

import copy
import warnings

import pytest
import torch
from torch import nn

from seqwarm_kernels import alibi_slopes, apply_alibi, register_alibi
from seqwarm_kernels.models import alibi_layer, surgery

from ..support.same import assert_same
from .test_refused import Positions, encoder, state_of, words
from .zoo import FAMILIES, HEADS, WIDTH, batch_with_images, heads_of, llava, make, slopes_of, tokens


def trained(model, optimizer, steps=2):
    for _ in range(steps):
        ids = tokens()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_report():
    model = make("gpt2")
    optimizer = torch.optim.AdamW(model.parameters())
    report = apply_alibi(model, 128, optimizers=optimizer)
    assert [(layer.path, layer.num_heads, layer.causal) for layer in report.replaced] == [
        ("transformer.h.0.attn", 4, True),
        ("transformer.h.1.attn", 4, True),
    ]
    assert report.removed == (("transformer.wpe", "Embedding", 64 * 32),)
    assert (report.max_seq_length, report.learn_slopes, report.dropped_from_optimizers) == (128, False, 1)
    assert report.verification.calls == 2
    assert report.verification.largest_error < 1e-5
    assert report.verification.smallest_effect > 1e-3
    assert report.verification.largest_position_error < 1e-5
    text = str(report)
    assert "ALiBi with fixed slopes in 2 layers (GPT2Attention), up to 128 tokens" in text
    assert "removed transformer.wpe (Embedding, 2,048 parameters)" in text


def test_a_removed_table_reads_as_zeros():
    model, path = make("gpt2"), "transformer.wpe"
    apply_alibi(model, 4096)
    removed = model.get_submodule(path)
    weight = removed.weight
    assert (weight.shape, weight.dtype, weight.requires_grad) == ((4096, WIDTH), torch.float32, False)
    assert weight.count_nonzero() == 0
    assert weight.untyped_storage().nbytes() == 4
    assert not [*removed.parameters(), *removed.state_dict()]
    assert model.to(torch.bfloat16).get_submodule(path).weight.dtype == torch.bfloat16
    assert model.to("meta").get_submodule(path).weight.is_meta
    assert model.to_empty(device="cpu").get_submodule(path).weight.count_nonzero() == 0
    assert sum(buffer.untyped_storage().nbytes() for buffer in removed.buffers()) <= 4


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_is_verified(name):
    """Also in its cache, if it has one. Modes, the config's use_cache and random numbers stay."""
    model = make(name).train()
    model.config.use_cache = False
    torch.manual_seed(3)
    expected_draw = torch.rand(1)
    torch.manual_seed(3)
    report = apply_alibi(model, 96)
    assert torch.rand(1).equal(expected_draw)  # the verification draws random numbers, too
    assert all(module.training for module in model.modules())
    assert model.config.use_cache is False
    assert len(report.replaced) == model.config.num_hidden_layers
    assert {layer.causal for layer in report.replaced} == {FAMILIES[name].causal}
    assert (report.verification.cache_error is not None) == FAMILIES[name].causal == ("cache" in str(report))
    assert not FAMILIES[name].causal or report.verification.cache_error < 1e-5
    assert model.config.seqwarm_alibi == {"max_seq_length": 96, "learn_slopes": False}
    if hasattr(model.config, "max_position_embeddings"):
        first = model.config.pad_token_id + 1 if name == "roberta" else 0
        assert model.config.max_position_embeddings == 96 + first


def test_optimizers_keep_all_remaining_parameters():
    model = make("gpt2")
    named = [(name, p) for name, p in model.named_parameters() if "wpe" not in name and "wte" not in name]
    tables = [(name, p) for name, p in model.named_parameters() if "wpe" in name or "wte" in name]
    groups = [{"params": named, "lr": 1e-2}, {"params": tables, "weight_decay": 0.5}]
    adam, sgd = torch.optim.AdamW(groups), torch.optim.SGD(model.transformer.wpe.parameters(), momentum=0.9)
    trained(model, adam)
    table = model.transformer.wpe.weight
    before = {id(p): copy.deepcopy(state) for p, state in adam.state.items() if p is not table}
    report = apply_alibi(model, 64, optimizers=[adam, sgd])
    assert report.dropped_from_optimizers == 2
    assert [len(group["params"]) for group in adam.param_groups] == [len(named), 1]
    assert adam.param_groups[1]["param_names"] == ["transformer.wte.weight"]
    assert adam.param_groups[1]["weight_decay"] == 0.5
    assert sgd.param_groups[0]["params"] == []
    torch.testing.assert_close({id(p): state for p, state in adam.state.items()}, before, rtol=0, atol=0)
    assert model.lm_head.weight is model.transformer.wte.weight
    trained(model, adam)
    adam.load_state_dict(adam.state_dict())


def test_a_position_table_that_is_tied_to_another_weight_is_not_dropped():
    model = make("gpt2")
    model.extra = nn.Linear(WIDTH, 64, bias=False)
    model.extra.weight = model.transformer.wpe.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert apply_alibi(model, 64, optimizers=optimizer).dropped_from_optimizers == 0


def step(optimizer):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()


@pytest.mark.parametrize(
    "case", ["forgotten", "passed", "a second optimizer", "frozen", "fixed", "another model", "deleted"]
)
def test_learned_slopes_that_no_optimizer_trains_warn_once_at_its_second_step(case):
    """Not if they are trained or need no training."""
    model = make("gpt2")
    optimizers = [torch.optim.SGD((make("llama") if case == "another model" else model).parameters(), lr=0.1)]
    apply_alibi(model, 64, learn_slopes=case != "fixed", optimizers=optimizers if case == "passed" else None)
    slopes = [parameter for name, parameter in model.named_parameters() if name.endswith("slopes")]
    if case == "a second optimizer":
        optimizers.append(torch.optim.SGD(slopes, lr=0.1))
    elif case == "frozen":
        for parameter in slopes:
            parameter.requires_grad_(False)
    elif case == "deleted":
        del model
    messages = []
    for _ in range(3):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for each in optimizers:
                step(each)
        messages.append([str(warning.message)[:22] for warning in caught])
    assert messages == [[], ["2 of 2 learned slopes "] if case == "forgotten" else [], []]


@pytest.mark.parametrize("name", ["roberta", "llama", "mpt"])
def test_a_second_call_changes_the_length_and_keeps_the_slopes(name):
    model, fresh, ids = make(name), make(name), tokens(2, 48)
    apply_alibi(model, 48, learn_slopes=True)
    for heads in heads_of(model):
        heads.slopes.data = torch.rand(HEADS)
    expected, before = model(ids).logits, state_of(model)
    with pytest.raises(TypeError, match="example_batch"):
        apply_alibi(model, 96, learn_slopes=True, example_batch=3)
    with pytest.raises(ValueError, match="verification"):
        apply_alibi(model, 96, learn_slopes=True, example_batch={"input_ids": None})
    assert_same(before, state_of(model))
    report = apply_alibi(model, 96, learn_slopes=True)
    assert (report.max_seq_length, len(report.replaced), report.removed) == (96, model.config.num_hidden_layers, ())
    assert model(ids).logits.equal(expected)
    apply_alibi(fresh, 96, learn_slopes=True)
    assert model.config.to_dict() == fresh.config.to_dict()
    for (_, buffer), (other, expected_buffer) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        assert buffer.shape == expected_buffer.shape, other
    hooks = [[len(module._forward_pre_hooks) for module in part.modules()] for part in (model, fresh)]
    assert hooks[0] == hooks[1]


@pytest.mark.parametrize("learned", [False, True])
def test_slopes_stay_float32(learned):
    model = make("bloom", n_head=6, hidden_size=36)
    apply_alibi(model, 64, learn_slopes=learned)
    expected = alibi_slopes(6)
    for heads in heads_of(model.to(torch.bfloat16)):
        assert heads.slopes.dtype == torch.float32
        assert heads.slopes.equal(expected)
    assert model(tokens()).logits.dtype == torch.bfloat16
    assert all(heads.slopes.dtype == torch.float32 for heads in heads_of(model.double()))


def test_models_in_half_precision_and_on_the_meta_device():
    for dtype in (torch.bfloat16, torch.float16):
        assert apply_alibi(make("gpt2", dtype), 64).verification.calls == 2
    report = apply_alibi(make("llama").to("meta"), 64)
    assert report.verification is None
    assert "not verified" in str(report)


@pytest.mark.parametrize(("name", "learn_slopes"), [("gpt2", True), ("llama", False), ("mpt", True)])
def test_a_failed_verification_undoes_everything(name, learn_slopes, monkeypatch):
    """Attention is patched to ignore the slopes. A group of the optimizer is as large as that of learned slopes."""
    model = make(name)
    parameters = list(model.parameters())
    groups = [parameters[: model.config.num_hidden_layers], parameters[model.config.num_hidden_layers :]]
    optimizer = torch.optim.AdamW([{"params": group} for group in groups], lr=1e-3)
    trained(model, optimizer)
    before = state_of(model, optimizer)
    attention = alibi_layer.alibi_attention

    def without_slopes(query, key, value, slopes, *, backend=None, **options):
        return attention(query, key, value, slopes if backend else 0 * slopes, backend=backend, **options)

    monkeypatch.setattr(alibi_layer, "alibi_attention", without_slopes)
    with pytest.raises(ValueError, match="not ALiBi attention"):
        apply_alibi(model, 256, optimizers=optimizer, learn_slopes=learn_slopes)
    assert_same(before, state_of(model, optimizer))
    trained(model, optimizer)


def test_a_registered_converter_removes_positions(monkeypatch):
    """Also those of a module in two places."""
    monkeypatch.setattr(surgery, "_converters", dict(surgery._converters))
    positions = Positions()
    model = nn.Sequential(words(), positions, positions, encoder())

    @register_alibi(Positions)
    def convert(module, surgery):
        surgery.replace(module, nn.Identity())

    report = apply_alibi(model, 64)
    assert [source[:2] for source in report.removed] == [("1", "Positions")]
    assert isinstance(model[1], nn.Identity)
    assert model[1] is model[2]


class CustomAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        query, key, value = self.mix(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if hasattr(self, "alibi"):
            return alibi_layer.alibi_layer_attention(self, query, key, value).transpose(1, 2).flatten(2)
        return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)


def test_a_registered_attention_is_converted(monkeypatch):
    """With the slopes of its converter, unless the caller gives others."""
    monkeypatch.setattr(surgery, "_converters", dict(surgery._converters))
    own, given = [1.0] * HEADS, [0.75, 0.5, 0.0, 2.0]

    @register_alibi(CustomAttention)
    def convert(module, surgery):
        surgery.give_alibi(module, HEADS, causal=True, slopes=own)

    for slopes, expected in ((None, own), (given, given)):
        model = nn.Sequential(nn.Embedding(11, WIDTH), CustomAttention())
        assert apply_alibi(model, 64, slopes=slopes).replaced == (("1", "CustomAttention", HEADS, True),)
        assert slopes_of(model) == [expected]


@pytest.mark.parametrize(
    ("tower", "make_batch"),
    [
        ("clip_vision_model", lambda: None),
        ("siglip_vision_model", batch_with_images),  # SigLIP has an nn.MultiheadAttention
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
