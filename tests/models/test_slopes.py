"""`slopes` of apply_alibi: in every family, in checkpoints, learned, and scaled for longer contexts."""

import copy

import numpy
import pytest
import torch
from torch import nn

from seqwarm_kernels import alibi_bias, alibi_slopes, apply_alibi, load_alibi_model, register_alibi
from seqwarm_kernels.models import AlibiHeads, surgery

from .test_surgery import CustomAttention, assert_unchanged, state_of
from .zoo import FAMILIES, HEADS, WIDTH, dense_mask, make, tokens, transformers, without_positions

OWN = [0.75, 0.1, 0.0, 2.0]


def slopes_of(model):
    return [module.slopes.tolist() for module in model.modules() if isinstance(module, AlibiHeads)]


def reset(model):
    for module in model.modules():
        if isinstance(module, AlibiHeads):
            module.reset_parameters()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_takes_keeps_and_saves_own_slopes(name, tmp_path):
    model, ids = make(name), tokens(2, 40)
    rows = torch.rand(model.config.num_hidden_layers, HEADS)
    replaced = apply_alibi(model, 48, slopes=rows).replaced
    assert [model.get_submodule(layer.path).alibi.slopes.tolist() for layer in replaced] == rows.tolist()
    expected = model(ids).logits
    apply_alibi(model, 64)
    assert slopes_of(model) == rows.tolist()
    model.save_pretrained(tmp_path)
    model_class = getattr(transformers, FAMILIES[name].model)
    loaded = load_alibi_model(model_class, tmp_path).eval()
    assert loaded(ids).logits.equal(expected)
    loaded.save_pretrained(tmp_path / "again")
    again = load_alibi_model(model_class, tmp_path / "again").eval()
    assert again(ids).logits.equal(expected)
    before = state_of(model)
    with pytest.raises(ValueError, match="the verification could not run"):
        apply_alibi(model, 96, slopes=OWN, example_batch={"input_ids": None})
    assert_unchanged(before, state_of(model))
    apply_alibi(model, 96, slopes=OWN)
    assert slopes_of(model) == [torch.tensor(OWN).tolist()] * len(rows)


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama"])
def test_own_slopes_equal_a_dense_bias(name):
    model, ids = make(name, torch.float64), tokens()
    twin = without_positions(model)
    mask = dense_mask(twin, torch.tensor(OWN), None, ids.shape[1], FAMILIES[name].causal)
    apply_alibi(model, 64, slopes=OWN)
    torch.testing.assert_close(model(ids).logits, twin(ids, attention_mask=mask).logits, rtol=0, atol=1e-6)


def test_slopes_scaled_for_a_longer_context(tmp_path):
    """At 8 times the distance the penalty is the old one, also after saving, loading and a reset."""
    model, longer = make("gpt2"), make("gpt2")
    apply_alibi(model, 64)
    apply_alibi(longer, 512, slopes=alibi_slopes(HEADS) * (64 / 512))
    longer.save_pretrained(tmp_path)
    loaded = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)
    reset(loaded)
    for old, new in zip(slopes_of(model), slopes_of(loaded), strict=True):
        bias = alibi_bias(torch.tensor(new), 512, 512)
        assert bias[:, ::8, ::8].equal(alibi_bias(torch.tensor(old), 64, 64))


@pytest.mark.parametrize(
    "slopes",
    [
        OWN,
        tuple(OWN),
        [OWN, OWN],
        numpy.array(OWN),
        numpy.array([OWN, OWN], dtype="float32"),
        torch.tensor(OWN, dtype=torch.float64, requires_grad=True),
        [torch.tensor(OWN), numpy.array(OWN)],
        [numpy.float32(number) for number in OWN],
    ],
    ids=lambda slopes: type(slopes).__name__,
)
def test_lists_arrays_and_tensors(slopes):
    model = make("gpt2")
    apply_alibi(model, 64, slopes=slopes)
    assert slopes_of(model) == [torch.tensor(OWN).tolist()] * 2


@pytest.mark.parametrize(
    ("slopes", "error", "message"),
    [
        (0.5, TypeError, "'float' object is not iterable"),
        ("0.5", ValueError, "could not convert string to float"),
        ([OWN, 0.5], TypeError, "'float' object is not iterable"),
        ([0.5, 0.5, 0.5, float("nan")], ValueError, "slopes must be finite in float32 and not negative, got nan"),
        ([0.5, 0.5, 0.5, 1e39], ValueError, r"slopes must be finite in float32 and not negative, got 1e\+39"),
        ([OWN, [0.5, 0.5, 0.5, -0.5]], ValueError, "slopes must be finite in float32 and not negative, got -0.5"),
        ([], ValueError, r"one number for each of the 4 heads of transformer.h.0.attn, got 0"),
        ([0.5], ValueError, r"one number for each of the 4 heads of transformer.h.0.attn, got 1"),
        ([OWN, OWN[1:]], ValueError, r"one number for each of the 4 heads of transformer.h.1.attn, got 3"),
        ([OWN], ValueError, r"slopes must have a row for each of the 2 layers, got 1 rows"),
        (torch.ones(3, HEADS), ValueError, "slopes must have a row for each of the 2 layers, got 3 rows"),
    ],
)
@pytest.mark.parametrize("converted", [False, True])
def test_bad_slopes_change_nothing(slopes, error, message, converted):
    model = make("gpt2")
    if converted:
        apply_alibi(model, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    with pytest.raises(error, match=message):
        apply_alibi(model, 96, slopes=slopes, optimizers=optimizer)
    assert_unchanged(before, state_of(model, optimizer))


def test_learned_slopes_begin_at_the_given_ones():
    model = make("llama")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_alibi(model, 64, learn_slopes=True, slopes=OWN, optimizers=optimizer)
    parameters = optimizer.param_groups[-1]["params"]
    assert [parameter.tolist() for parameter in parameters] == [torch.tensor(OWN).tolist()] * 2
    apply_alibi(model, 64, learn_slopes=True, slopes=OWN[::-1], optimizers=optimizer)
    assert [parameter.tolist() for parameter in parameters] == [torch.tensor(OWN[::-1]).tolist()] * 2
    assert optimizer.param_groups[-1]["params"] is parameters


def test_slopes_given_to_a_loaded_checkpoint_replace_the_saved_ones(tmp_path):
    model = make("gpt2")
    apply_alibi(model, 64, slopes=OWN)
    model.save_pretrained(tmp_path)
    loaded = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)
    apply_alibi(loaded, 64, slopes=OWN[::-1])
    assert slopes_of(loaded) == [torch.tensor(OWN[::-1]).tolist()] * 2


def test_slopes_are_not_rounded_to_the_default_dtype():
    model = make("llama")
    try:
        torch.set_default_dtype(torch.bfloat16)
        apply_alibi(model, 64, slopes=OWN)
        given = slopes_of(model)
        reset(model)
    finally:
        torch.set_default_dtype(torch.float32)
    assert given == slopes_of(model) == [torch.tensor(OWN).tolist()] * 2


def test_slopes_come_before_those_of_a_converter(monkeypatch):
    monkeypatch.setattr(surgery, "_converters", dict(surgery._converters))
    model = nn.Sequential(nn.Embedding(11, WIDTH), CustomAttention())

    @register_alibi(CustomAttention)
    def convert(module, surgery):
        surgery.give_alibi(module, HEADS, causal=True, slopes=[1.0] * HEADS)

    other = copy.deepcopy(model)
    apply_alibi(model, 64, slopes=OWN)
    apply_alibi(other, 64)
    assert (slopes_of(model), slopes_of(other)) == ([torch.tensor(OWN).tolist()], [[1.0] * HEADS])


def test_layers_of_pytorch():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2)
    rows = torch.rand(2, HEADS)
    assert [layer.path for layer in apply_alibi(encoder, 64, slopes=rows).replaced] == [
        "layers.0.self_attn",
        "layers.1.self_attn",
    ]
    assert slopes_of(encoder) == rows.tolist()


class Twice(nn.Module):
    """Two layers of one attention module."""

    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(11, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.second = self.first

    def forward(self, tokens):
        x = self.words(tokens)
        x = self.first(x, x, x)[0]
        return self.second(x, x, x)[0]


def test_layers_that_share_a_module_have_one_row():
    model = Twice()
    with pytest.raises(ValueError, match="slopes must have a row for each of the 1 layers, got 2 rows"):
        apply_alibi(model, 64, slopes=[OWN, OWN])
    assert apply_alibi(model, 64, slopes=[OWN]).verification.calls == 2
    assert slopes_of(model) == [torch.tensor(OWN).tolist()]
