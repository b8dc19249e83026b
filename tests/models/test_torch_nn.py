"""nn.MultiheadAttention and the layers that hold it, compared with their own code in float64 with a dense bias."""

import copy
import math

import pytest
import torch
from torch import nn

from seqwarm_kernels import alibi_slopes, apply_alibi, register_alibi
from seqwarm_kernels.models import surgery

ROWS, LENGTH, WIDTH, HEADS = 3, 11, 16, 4


def dense_bias(causal, padding=None):
    """Return (B · H, S, S), the `attn_mask` of nn.MultiheadAttention."""
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    bias = -alibi_slopes(HEADS).double()[:, None, None] * distance.abs()
    if causal:
        bias = bias.masked_fill(distance < 0, -1e30)
    bias = bias.expand(ROWS, -1, -1, -1)
    if padding is not None:
        bias = bias.masked_fill(padding[:, None, None, :], -1e30)
    return bias.reshape(-1, LENGTH, LENGTH)


def padded():
    """True where a token is padding."""
    mask = torch.zeros(ROWS, LENGTH, dtype=torch.bool)
    mask[1, -4:] = True
    mask[2, :2] = True
    return mask


def run(layer, x, valid, **options):
    """Return the unpadded outputs, and all gradients."""
    layer.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x, **options)
    batch_first = out if valid.shape == out.shape[:2] else out.transpose(0, 1)
    (batch_first * torch.linspace(-1, 1, WIDTH))[valid].sum().backward()
    return [batch_first[valid], x.grad, *[parameter.grad for parameter in layer.parameters()]]


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


class SelfAttention(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, **options)

    def forward(self, x, **options):
        return self.attention(x, x, x, **options)[0]


def converted_attention(**options):
    layer = nn.MultiheadAttention(WIDTH, HEADS, **options)
    apply_alibi(layer, 64)
    return layer


@pytest.mark.parametrize(
    ("causal", "padding", "batch_first", "bias"),
    [
        (False, None, True, True),
        (False, padded(), False, False),
        (True, None, False, True),
        (True, torch.zeros(ROWS, LENGTH, dtype=torch.float64).masked_fill(padded(), -torch.inf), True, False),
    ],
)
def test_multihead_attention(causal, padding, batch_first, bias):
    layer = SelfAttention(batch_first=batch_first, bias=bias).double()
    twin = copy.deepcopy(layer)
    x = torch.randn((ROWS, LENGTH, WIDTH) if batch_first else (LENGTH, ROWS, WIDTH), dtype=torch.float64)
    hidden = None if padding is None else padded()
    valid = torch.ones(ROWS, LENGTH, dtype=torch.bool) if hidden is None else ~hidden
    expected = run(twin, x, valid, attn_mask=dense_bias(causal, hidden))
    assert apply_alibi(layer, 64, example_batch=x).verification.calls == 1
    options = {"is_causal": True, "attn_mask": torch.zeros(LENGTH, LENGTH)} if causal else {}
    assert_equal(run(layer, x, valid, key_padding_mask=padding, **options), expected)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_encoder(norm_first, training):
    """Also in evaluation without gradients, where PyTorch's fused path would bypass the attention."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).double().train(training)
    twin = copy.deepcopy(encoder)
    x = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    valid = ~padded()
    expected = run(twin, x, valid, mask=dense_bias(False, padded()))
    assert len(apply_alibi(encoder, 64).replaced) == 2
    assert_equal(run(encoder, x, valid, src_key_padding_mask=padded()), expected)
    with torch.no_grad():
        for hidden in (padded(), padded() & (torch.arange(LENGTH) > 2)):  # only the second could be a nested tensor
            out = encoder(x, src_key_padding_mask=hidden)
            exact = twin.train()(x, mask=dense_bias(False, hidden))  # PyTorch's fused path returns NaN for such a mask
            assert_equal(out[~hidden], exact[~hidden])
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    assert_equal(encoder(x, mask=causal), twin(x, mask=dense_bias(True)))


def test_cross_attention_of_a_decoder_is_unchanged():
    layer = nn.TransformerDecoderLayer(WIDTH, HEADS, 24, dropout=0.0, batch_first=True).double()
    twin = copy.deepcopy(layer)
    x, memory = torch.randn(2, ROWS, LENGTH, WIDTH, dtype=torch.float64).unbind()
    batch = {"tgt": x, "memory": memory}
    assert [replaced.path for replaced in apply_alibi(layer, 64, example_batch=batch).replaced] == ["self_attn"]
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
    out = layer(x, memory, tgt_mask=causal, tgt_is_causal=True)
    assert_equal(out, twin(x, memory, tgt_mask=dense_bias(True)))


class CrossAttention(nn.MultiheadAttention):
    pass


class Crossing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.attention = SelfAttention(batch_first=True)
        self.cross = kind(WIDTH, HEADS, batch_first=True)

    def forward(self, x, memory):
        return self.cross(self.attention(x), memory, memory)[0]


def test_cross_attention_of_a_module_of_your_own(monkeypatch):
    monkeypatch.setattr(surgery, "_converters", dict(surgery._converters))
    batch = {"x": torch.randn(ROWS, LENGTH, WIDTH), "memory": torch.randn(ROWS, 5, WIDTH)}
    with pytest.raises(ValueError, match="key and value"):
        apply_alibi(Crossing(nn.MultiheadAttention), 64, example_batch=batch)
    register_alibi(CrossAttention)(lambda module, surgery: None)
    model = Crossing(CrossAttention)
    assert [replaced.path for replaced in apply_alibi(model, 64, example_batch=batch).replaced] == [
        "attention.attention"
    ]
    assert type(model.cross) is CrossAttention


@pytest.mark.parametrize("compiled", [False, True])
def test_other_keys_are_refused(compiled):
    """They were attended without ALiBi: also those of a copied input, and all keys by the last query."""
    layer = converted_attention(batch_first=True)
    attend = torch.compile(layer, backend="eager") if compiled else layer
    x, y = torch.randn(2, ROWS, LENGTH, WIDTH).unbind()
    for inputs in [(x, y, y), (x, x.clone(), x), (x, x, x.clone()), (x[:, -1:], x, x), (x, x.mT.contiguous().mT, x)]:
        with pytest.raises(ValueError, match="key and value"):
            attend(*inputs)


def test_views_of_one_tensor():
    """The recomputation of reentrant checkpointing gets a view for each argument."""
    layer, x = converted_attention(batch_first=True), torch.randn(ROWS, LENGTH, WIDTH)
    assert layer(x.view_as(x), x.view_as(x), x)[0].equal(layer(x, x, x)[0])


def test_rows_of_one_sequence_and_weights():
    layer = converted_attention()
    x = torch.randn(LENGTH, WIDTH)
    out, weights = layer(x, x, x)
    assert weights is None
    batched = x.unsqueeze(1)
    torch.testing.assert_close(out, layer(batched, batched, batched)[0].squeeze(1))


@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [(-1e4, torch.float32), (-65504.0, torch.bfloat16), (torch.finfo(torch.float32).min, torch.float32)],
)
def test_numbers_that_hide_keys(hidden, dtype):
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    twin = copy.deepcopy(layer).double()
    apply_alibi(layer, 64)
    x, mask = torch.randn(ROWS, LENGTH, WIDTH), torch.zeros(ROWS, LENGTH).masked_fill(padded(), hidden)
    out = layer(x, x, x, key_padding_mask=mask.to(dtype))[0]
    added = dense_bias(False).unflatten(0, (ROWS, HEADS)) + mask.double()[:, None, None]
    exact = twin(x.double(), x.double(), x.double(), attn_mask=added.flatten(0, 1))[0]  # all queries see a key
    torch.testing.assert_close(out, exact.float())


@pytest.mark.parametrize("number", [-9999.0, torch.nan])
def test_numbers_that_do_not_hide_keys_are_refused(number):
    layer = converted_attention()
    x, mask = torch.randn(LENGTH, ROWS, WIDTH), torch.zeros(ROWS, LENGTH)
    mask[1, 3], mask[2, 4] = number, -torch.inf
    with pytest.raises(ValueError, match="key_padding_mask"):
        layer(x, x, x, key_padding_mask=mask)
    if math.isnan(number):
        compiled, hidden = (
            torch.compile(layer, backend="eager"),
            {"key_padding_mask": mask.nan_to_num(0.0, neginf=-torch.inf)},
        )
        torch.testing.assert_close(compiled(x, x, x, **hidden)[0], layer(x, x, x, **hidden)[0])
        with pytest.raises(RuntimeError, match="key_padding_mask"):
            compiled(x, x, x, key_padding_mask=mask)


@pytest.mark.parametrize(
    ("name", "mask", "error"),
    [
        ("key_padding_mask", padded().long(), TypeError),
        ("attn_mask", torch.zeros(LENGTH, LENGTH), ValueError),  # is not known to be causal
    ],
)
def test_other_masks_are_refused(name, mask, error):
    x = torch.randn(LENGTH, ROWS, WIDTH)
    with pytest.raises(error, match=name):
        converted_attention()(x, x, x, **{name: mask})
