"""The semantics of alibi_attention, for backends with float64. test_attention_kernels.py tests the others."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes
from tests.support.backends import serving
from tests.support.dense import dense_attention, distance_and_visibility
from tests.support.tiers import examples

pytestmark = pytest.mark.parametrize("backend", serving("alibi_attention", torch.float64))


def random_inputs(batch_size=2, heads=(4, 2), lengths=(7, 9), head_dim=5, dtype=torch.float64):
    query = torch.randn(batch_size, heads[0], lengths[0], head_dim, dtype=torch.float64)
    key = torch.randn(batch_size, heads[1], lengths[1], head_dim, dtype=torch.float64)
    value = torch.randn(batch_size, heads[1], lengths[1], head_dim, dtype=torch.float64)
    return [tensor.to(dtype).requires_grad_() for tensor in (query, key, value)]


def padding(batch_size, key_length):
    mask = torch.rand(batch_size, key_length) > 0.3
    if batch_size:
        mask[0] = False  # a row that hides every key
    return mask


CASES = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window": 3},
    "window of none but itself": {"window": 0, "causal": False},
    "start before the keys": {"query_start": -4},
    "start inside": {"query_start": 1, "causal": False},
    "start beyond the keys": {"query_start": 30, "window": 26},
    "scale": {"scale": 0.3},
    "negative scale": {"scale": -1.5, "causal": False},
}
SHAPES = {
    "gqa": {},
    "one head": {"heads": (1, 1)},
    "mqa": {"heads": (3, 1)},
    "more queries than keys": {"lengths": (9, 4)},
    "one token": {"lengths": (1, 1), "head_dim": 1},
    "no keys": {"lengths": (3, 0)},
    "no queries": {"lengths": (0, 3)},
    "no rows": {"batch_size": 0},
}


def options_with_mask(options, batch_size, key_length):
    return {**options, "key_padding_mask": padding(batch_size, key_length)}


def check_against_dense(backend, inputs, slopes, options):
    query, key, value = inputs
    leaves = [*inputs, slopes]
    out, lse = alibi_attention(query, key, value, slopes, return_lse=True, backend=backend, **options)
    rules = {name: given for name, given in options.items() if name != "scale"}
    distance, visible = distance_and_visibility(query.shape[0], query.shape[2], key.shape[2], **rules)
    expected, expected_lse = dense_attention(query, key, value, slopes, distance, visible, scale=options.get("scale"))
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(lse, expected_lse, **close)

    seen = lse.isfinite()
    weights, lse_weights = torch.randn_like(out), torch.randn_like(lse)[seen]
    gradients = torch.autograd.grad((out * weights).sum() + (lse[seen] * lse_weights).sum(), leaves)
    objective = (expected * weights).sum() + (expected_lse[seen] * lse_weights).sum()
    wanted = torch.autograd.grad(objective, leaves, allow_unused=True) if objective.requires_grad else [None] * 4
    for gradient, want, leaf in zip(gradients, wanted, leaves, strict=True):
        torch.testing.assert_close(gradient, torch.zeros_like(leaf) if want is None else want, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("case", CASES)
def test_outputs_and_gradients_match_the_dense_computation(backend, case, shape, masked):
    inputs = random_inputs(**SHAPES[shape])
    slopes = torch.rand(inputs[0].shape[1], dtype=torch.float64, requires_grad=True)
    options = CASES[case]
    if masked:
        options = options_with_mask(options, inputs[1].shape[0], inputs[1].shape[2])
    check_against_dense(backend, inputs, slopes, options)


@pytest.mark.parametrize("segment_length", [1, 2, 3, 8, 9, 100])
@pytest.mark.parametrize("causal", [False, True])
def test_segments(backend, segment_length, causal):
    inputs = random_inputs(lengths=(9, 9))
    slopes = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    options = options_with_mask({"segment_length": segment_length, "causal": causal, "window": 4}, 2, 9)
    check_against_dense(backend, inputs, slopes, options)


@pytest.mark.parametrize("slope", [0.0, 1e-30, -0.5, 1e4])
def test_any_slopes(backend, slope):
    slopes = torch.full((4,), slope, dtype=torch.float64, requires_grad=True)
    check_against_dense(backend, random_inputs(), slopes, {"causal": False})


@pytest.mark.parametrize("query_start", [torch.tensor(2), torch.tensor([5]), torch.tensor([-1, 7], dtype=torch.int32)])
def test_query_start_as_a_tensor(backend, query_start):
    slopes = torch.rand(4, dtype=torch.float64, requires_grad=True)
    check_against_dense(backend, random_inputs(), slopes, {"query_start": query_start})


@examples(60)
@given(data=st.data())
def test_everything_combined(backend, data):
    draw = data.draw
    key_heads = draw(st.integers(1, 3))
    lengths = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    batch_size = draw(st.integers(0, 2))
    segment_length = draw(st.none() | st.integers(1, 10)) if lengths[0] == lengths[1] else None
    torch.manual_seed(draw(st.integers(0, 1000)))
    inputs = random_inputs(
        batch_size=batch_size,
        heads=(key_heads * draw(st.integers(1, 3)), key_heads),
        lengths=lengths,
        head_dim=draw(st.integers(1, 7)),
    )
    heads = inputs[0].shape[1]
    shape = draw(st.sampled_from([(heads,), (batch_size, heads)]))
    options = {
        "causal": draw(st.booleans()),
        "window": draw(st.none() | st.integers(0, 10)),
        "segment_length": segment_length,
        "query_start": draw(st.none() | st.integers(-12, 12)) if segment_length is None else None,
        "scale": draw(st.none() | st.floats(-2, 2)),
    }
    if draw(st.booleans()):
        options = options_with_mask(options, batch_size, lengths[1])
    check_against_dense(backend, inputs, torch.randn(shape, dtype=torch.float64).requires_grad_(), options)


@pytest.mark.slow
def test_gradcheck_of_everything_combined(backend):
    inputs = random_inputs(batch_size=2, heads=(4, 2), lengths=(6, 6), head_dim=3)
    slopes = torch.rand(2, 4, dtype=torch.float64, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [0, 0, 1, 1, 0, 1]], dtype=torch.bool)

    def attend(query, key, value, slopes, **options):
        torch.manual_seed(1)
        out, lse = alibi_attention(
            query, key, value, slopes, key_padding_mask=mask, return_lse=True, backend=backend, **options
        )
        return out, lse.masked_fill(lse.isinf(), 0)

    for causal, dropout_p in itertools.product([True, False], [0.0, 0.4]):
        common = {"causal": causal, "dropout_p": dropout_p}
        for options in ({"window": 2, "segment_length": 4}, {"window": 4, "query_start": 1}):
            assert torch.autograd.gradcheck(lambda *args: attend(*args, **common, **options), (*inputs, slopes))  # noqa: B023


def test_strided_inputs(backend):
    packed = torch.randn(2, 9, 3, 4, 5, dtype=torch.float64)  # (B, S, 3, H, D), as a fused projection returns it
    query, key, value = packed.permute(2, 0, 3, 1, 4)
    out = alibi_attention(query, key, value, backend=backend)
    copies = [tensor.contiguous() for tensor in (query, key, value)]
    torch.testing.assert_close(out, alibi_attention(*copies, backend=backend), rtol=0, atol=0)
    truncated = alibi_attention(query[:, :, :4], key[:, :, :4], value[:, :, :4], backend=backend)
    torch.testing.assert_close(truncated, out[:, :, :4], rtol=1e-12, atol=1e-12)
    backwards = key.flip(2).transpose(-1, -2).contiguous().transpose(-1, -2)
    torch.testing.assert_close(
        alibi_attention(query, backwards, value, backend=backend),
        alibi_attention(query, backwards.contiguous(), value, backend=backend),
        rtol=0,
        atol=0,
    )


def test_segments_equal_rows(backend):
    query, key, value = random_inputs(lengths=(12, 12))
    out, lse = alibi_attention(query, key, value, segment_length=4, return_lse=True, backend=backend)
    rows = [t.unflatten(2, (3, 4)).transpose(1, 2).flatten(0, 1) for t in (query, key, value)]
    out_rows, lse_rows = alibi_attention(*rows, return_lse=True, backend=backend)
    torch.testing.assert_close(out, out_rows.unflatten(0, (2, 3)).transpose(1, 2).flatten(2, 3), rtol=0, atol=1e-14)
    torch.testing.assert_close(lse, lse_rows.unflatten(0, (2, 3)).transpose(1, 2).flatten(2, 3), rtol=0, atol=1e-14)


def test_shards_of_the_keys_merge_by_their_lse(backend):
    query, key, value = random_inputs(lengths=(6, 10))
    leaves = [query, key, value]
    whole, whole_lse = alibi_attention(query, key, value, return_lse=True, backend=backend)
    shards = [
        alibi_attention(query, key[:, :, a:b], value[:, :, a:b], query_start=4 - a, return_lse=True, backend=backend)
        for a, b in ((0, 4), (4, 7), (7, 10))
    ]
    lse = torch.stack([shard_lse for _, shard_lse in shards]).logsumexp(0)
    merged = sum(out * (shard_lse - lse).exp()[..., None] for out, shard_lse in shards)
    torch.testing.assert_close(merged, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * weights).sum(), leaves)
    for gradient, want in zip(torch.autograd.grad((merged * weights).sum(), leaves), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-10, atol=1e-10)


def test_default_slopes_and_scale(backend):
    query, key, value = random_inputs(heads=(4, 4), lengths=(5, 5))
    biased = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=alibi_bias(alibi_slopes(4).double(), 5, 5)
    )
    torch.testing.assert_close(alibi_attention(query, key, value, backend=backend), biased, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [1, 3, 64, 129, 256])
def test_lower_precision_stays_inside_its_error_budget(backend, dtype, head_dim):
    inputs = random_inputs(lengths=(65, 65), head_dim=head_dim, dtype=dtype)
    slopes = alibi_slopes(4).requires_grad_()
    out, lse = alibi_attention(*inputs, slopes, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in [*inputs, slopes]]
    exact = alibi_attention(*exact_inputs, backend="reference")
    weights = torch.randn_like(exact)
    gradients = torch.autograd.grad((out * weights.to(dtype)).sum(), [*inputs, slopes])
    wanted = torch.autograd.grad((exact * weights.to(dtype)).sum(), exact_inputs)
    # float32 accumulates over at most 65 keys, 256 channels and 2 x 65 rows; the result is rounded once to dtype
    for got, want in zip([out, *gradients], [exact, *wanted], strict=True):
        budget = (torch.finfo(got.dtype).eps + 64 * torch.finfo(torch.float32).eps) * want.abs().max().item()
        assert (got.double() - want).abs().max().item() <= budget


def test_dropout_is_reproducible_and_unbiased(backend):
    query, key, value = (tensor.detach() for tensor in random_inputs(heads=(4, 4), lengths=(40, 40)))
    value = torch.ones_like(value)
    torch.manual_seed(3)
    first = alibi_attention(query, key, value, dropout_p=0.25, backend=backend)
    second = alibi_attention(query, key, value, dropout_p=0.25, backend=backend)
    torch.manual_seed(3)
    again = alibi_attention(query, key, value, dropout_p=0.25, backend=backend)
    torch.testing.assert_close(first, again, rtol=0, atol=0)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[:, 0], first[:, 1])
    draws = [alibi_attention(query, key, value, dropout_p=0.25, backend=backend).mean() for _ in range(20)]
    assert torch.stack(draws).mean().item() == pytest.approx(1, abs=0.02)


def test_dropout_drops_the_weights_of_the_seed(backend):
    """With one-hot values the output is the matrix of kept weights."""
    query, key, _ = (tensor.detach() for tensor in random_inputs(batch_size=2, heads=(2, 2), lengths=(9, 9)))
    value = torch.eye(9, dtype=torch.float64).expand(2, 2, 9, 9)
    query, key = (torch.nn.functional.pad(tensor, (0, 4)) for tensor in (query, key))
    weights = alibi_attention(query, key, value, causal=False, backend=backend)
    dropped = alibi_attention(query, key, value, causal=False, dropout_p=0.5, backend=backend)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * weights[kept], rtol=1e-12, atol=0)
    assert 0.3 < kept.double().mean() < 0.7
