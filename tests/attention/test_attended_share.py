"""The error bounds of skip_tolerance on adversarial inputs, and the share of attended keys."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, attended_share, attended_share_varlen
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions
from seqwarm_kernels.ops.library import overload

from ..support.skipping import check_error_bounds
from ..support.tiers import examples, first_fast

SKIPPING = [
    name for name in ("triton", "native") if backends.why_not("alibi_attention", name, "cpu", torch.float32) is None
]
pytestmark = pytest.mark.parametrize("backend", SKIPPING)


@pytest.fixture(autouse=True)
def _short_reach(monkeypatch):
    """Makes the kernels look for keys to skip even among few keys."""
    ranges = pytest.importorskip("seqwarm_kernels.ops.alibi_attention.triton_ranges")
    monkeypatch.setattr(ranges, "MIN_KEYS_TO_SKIP", 1)
    monkeypatch.setattr(ranges, "MIN_QUERIES_TO_SKIP", 1)


def inputs(lengths=(300, 300), heads=(2, 1), batch_size=1, head_dim=16, dtype=torch.float32):
    shapes = [(heads[0], lengths[0]), (heads[1], lengths[1]), (heads[1], lengths[1])]
    return [torch.randn(batch_size, *shape, head_dim).to(dtype) for shape in shapes]


def forward(backend, tensors, slopes, query_start=240, *, causal=False, window=None, tolerance=2**-10):
    """The operator's outputs: out, lse, and what backward needs."""
    options = DenseOptions(None, None, None, query_start, causal, 0.25, None, window, 0.0, tolerance)
    return overload("alibi_attention", backend)(*tensors, slopes, *options)


STEEP = torch.tensor([0.5, 2.0])
TOLERANCES = [2**-4, 2**-24]


@pytest.mark.parametrize("causal", first_fast([True, False], "exhaustive_in_interpreter"))
@pytest.mark.parametrize("tolerance", first_fast(TOLERANCES, "exhaustive_in_interpreter"))
def test_ordinary_inputs(backend, causal, tolerance):
    tensors = inputs(lengths=(72, 200))
    check_error_bounds(backend, tensors, STEEP, tolerance, causal=causal)
    share = attended_share(*tensors, STEEP, causal=causal, skip_tolerance=tolerance, backend=backend)
    assert share.max() < 0.8, "nothing was skipped"
    assert share[0, 1] <= share[0, 0]


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_gradients_of_keys_that_few_queries_attend(backend, causal):
    """Enough blocks of queries and of keys for every loop of the Triton kernel that finds them."""
    tensors = inputs(lengths=(230, 1100))
    check_error_bounds(backend, tensors, STEEP, 2**-24, causal=causal, query_start=860)


def norms_of(name, tensors):
    query, key, _ = tensors
    if name == "huge":
        query *= 30
        key *= 30
    elif name == "far keys":  # one in each row and head: aligned with the last query, or with an early one
        for row, head, place, far in ((0, 1, 3, -1), (1, 0, 3, -1), (0, 0, -3, 10)):
            key[row, head, place] = 40 * query[row, head, far]
    elif name == "zero":
        key.zero_()
    elif name == "growing":
        query *= torch.linspace(30, 0.1, query.shape[2])[:, None]  # early queries reach farther than late ones
    elif name == "uneven":
        query[:, :, 128:192] *= 40


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", ["huge", "far keys", "zero", "growing", "uneven"])
def test_adversarial_norms(backend, name, causal):
    tensors = inputs(heads=(2, 2), batch_size=2)
    norms_of(name, tensors)
    for tolerance in TOLERANCES:
        check_error_bounds(backend, tensors, STEEP, tolerance, causal=causal)


@pytest.mark.exhaustive_in_interpreter
def test_queries_that_see_no_key_do_not_count(backend):
    query, key, value = inputs(lengths=(192, 192), heads=(1, 1))
    blind, slopes = torch.cat([torch.randn(1, 1, 128, 16), query], dim=2), torch.tensor([4.0])
    share = attended_share(query, key, value, slopes, backend=backend)
    assert share < 0.8
    assert torch.equal(attended_share(blind, key, value, slopes, query_start=-128, backend=backend), share)
    alone = attended_share(blind[:, :, :128], key, value, slopes, query_start=-128, backend=backend)
    assert alone == 1


@pytest.mark.parametrize(
    ("strength", "after"), first_fast([(117, False), (117, True), (150, False)], "exhaustive_in_interpreter")
)
def test_the_bound_is_tight(backend, strength, after):
    """One query and one aligned key, at the largest distance at which the key weighs more than the tolerance."""
    query, key, value = inputs(lengths=(1, 256), heads=(1, 1))
    query.zero_()
    key.zero_()
    query[..., 0], key_at = 10.0, strength + 1  # its weight is e^-1, next to a sum of 1.6 or 2.2 of the near keys
    position = 20 if after else 240
    key[0, 0, position + key_at if after else position - key_at, 0] = strength / (10 * 16**-0.5)
    options = {"query_start": position, "causal": not after}
    check_error_bounds(backend, [query, key, value], torch.tensor([1.0]), 2**-4, **options)


@pytest.mark.exhaustive_in_interpreter
def test_many_far_keys_weigh_more_than_the_first_of_them(backend):
    """With a flat slope, 400 keys, each below ε, together weigh more than all other keys."""
    slope, length, far = 0.02, 800, 400
    query, key, value = inputs((length, length), heads=(2, 1))
    query.zero_(), key.zero_()
    score = slope * (length - far - 5) - math.log(2) * 4  # gives the far keys 2^-4 of the nearest key's weight
    query[..., -1, 0] = score * 4  # the scale is 1 / 4
    key[:, :, :far, 0], key[:, :, far:-1, 0] = 1, -1
    check_error_bounds(backend, [query, key, value], torch.full((2,), slope), 2**-4)


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_a_masked_diagonal(backend, causal):
    """Without a sum of near keys nothing may be skipped. Padding holds NaN."""
    query, key, value = inputs(lengths=(300, 300), heads=(1, 1), batch_size=2)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, 40:] = False
    mask[1, 100:280] = False
    for tensor in (key, value):
        tensor.masked_fill_(~mask[:, None, :, None], float("nan"))
    clean = [query, key.nan_to_num(0), value.nan_to_num(0)]
    options = {"causal": causal, "key_padding_mask": mask}
    expected, _ = check_error_bounds(backend, clean, STEEP[:1], 2**-24, **options)
    out = alibi_attention(query, key, value, STEEP[:1], backend=backend, **options)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize("bad", first_fast([float("nan"), float("inf")], "exhaustive_in_interpreter"))
def test_a_key_that_is_not_finite_is_visited(backend, bad):
    query, key, value = inputs(lengths=(20, 150), heads=(1, 1))
    query[0, 0, -1] = 1.0
    key[0, 0, 2, 0], key[0, 0, 2, 1] = bad, -bad  # their products sum to NaN
    slopes = torch.tensor([4.0])
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    out = alibi_attention(*leaves, slopes, backend=backend)
    exact = alibi_attention(*[tensor.double() for tensor in leaves], slopes.double(), backend="reference")
    assert (out.isnan() == exact.isnan()).all()
    assert out[0, 0, -1].isnan().all()
    (gradient,) = torch.autograd.grad(out.sum(), query)
    assert gradient[0, 0, -1].isnan().all()


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize(
    "options",
    [
        {"window": 100},
        {"window": 90, "causal": False},
        {"segment_length": 130},
        {"segment_length": 170, "causal": False},
        {"query_start": 120, "causal": False},
    ],
    ids=str,
)
def test_with_other_rules(backend, options):
    tensors = inputs(heads=(4, 2), batch_size=2)
    slopes = torch.tensor([[0.1, 0.5, 1.0, 3.0], [3.0, 0.0, 0.3, -0.1]])
    check_error_bounds(backend, tensors, slopes, 2**-6, **options)


@pytest.mark.exhaustive_in_interpreter
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences(backend, causal):
    lengths_q, lengths_k = [100, 0, 150, 3], [160, 5, 150, 90]
    cu = [torch.tensor([0, *lengths]).cumsum(0).to(torch.int32) for lengths in (lengths_q, lengths_k)]
    query, key, value = (
        torch.randn(sum(lengths), heads, 16) for lengths, heads in ((lengths_q, 4), (lengths_k, 2), (lengths_k, 2))
    )
    packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), cu, strict=True), max_seqlen_q=150, max_seqlen_k=160)
    slopes = torch.tensor([0.5, 1.0, 2.0, 4.0])

    def attention(query, key, value, **options):
        return alibi_attention_varlen(query, key, value, **packing, **options)

    check_error_bounds(backend, [query, key, value], slopes, 2**-6, attention, causal=causal)
    share = attended_share_varlen(
        query, key, value, **packing, slopes=slopes, causal=causal, skip_tolerance=2**-6, backend=backend
    )
    assert share[-1] < 0.9


def test_backward_loads_nothing_that_forward_skipped(backend):
    """Keys that no query attended hold NaN when backward runs."""
    query, key, value = inputs(lengths=(32, 256), heads=(1, 1))
    slopes = torch.tensor([4.0])
    options = DenseOptions(None, None, None, 224, True, 0.25, None, None, 0.0, 2**-10)
    out, lse, log2_sum, ranges = overload("alibi_attention", backend)(query, key, value, slopes, *options)
    first = int(ranges[..., ::2].min()) // 128 * 128  # tiles of backward may reach this much farther
    assert first >= 128
    arguments = (torch.ones_like(out), torch.zeros_like(lse), out, lse, log2_sum, ranges, True)
    wanted = overload("alibi_attention_backward", backend)(*arguments, query, key, value, slopes, *options)
    for tensor in (key, value):
        tensor[:, :, :first] = float("nan")
    gradients = overload("alibi_attention_backward", backend)(*arguments, query, key, value, slopes, *options)
    for gradient, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=0, atol=0)
    assert (gradients[1][:, :, :first] == 0).all()


@pytest.mark.parametrize(
    ("causal", "window"), first_fast([(False, None), (False, 12), (True, None)], "exhaustive_in_interpreter")
)
def test_forward_attends_no_key_outside_of_its_ranges(backend, causal, window):
    """Their values hold NaN when it runs again."""
    query, key, value = inputs(lengths=(32, 512), heads=(1, 1))
    slopes = torch.tensor([0.4])
    out, _, _, ranges = forward(backend, (query, key, value), slopes, causal=causal, window=window)
    begin, end = ranges.flatten().tolist()
    assert 100 < begin < end < 400
    value[:, :, :begin] = float("nan")
    if not causal:  # otherwise `end` is the first key that no query sees
        value[:, :, end:] = float("nan")
    again, *_ = forward(backend, (query, key, value), slopes, causal=causal, window=window)
    torch.testing.assert_close(again, out, rtol=0, atol=0)


def test_zeros_are_skipped_however_large_the_queries_are(backend):
    query, key, value = inputs(lengths=(32, 512), heads=(1, 1))
    for size in (1, 1000):
        *_, ranges = forward(backend, (size * query, 0 * key, value), torch.tensor([0.4]))
        assert ranges.min() > 100
        assert ranges.max() < 400


@pytest.mark.exhaustive_in_interpreter
@examples(25)
@given(data=st.data())
def test_the_promise_on_random_inputs(backend, data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 10000)))
    heads = draw(st.sampled_from([(1, 1), (2, 1), (2, 2)]))
    lengths = draw(st.tuples(st.integers(1, 260), st.integers(1, 260)))
    query, key, value = inputs(lengths=lengths, heads=heads, head_dim=draw(st.sampled_from([3, 16])))
    query *= draw(st.sampled_from([0.0, 0.1, 1.0, 10.0]))
    key *= torch.rand(lengths[1], 1).pow(draw(st.sampled_from([0.0, 1.0, 8.0]))) * draw(st.sampled_from([1.0, 20.0]))
    slopes = torch.tensor([draw(st.sampled_from([-0.1, 0.0, 0.01, 0.3, 2.0, 50.0])) for _ in range(heads[0])])
    options = {"causal": draw(st.booleans()), "query_start": draw(st.none() | st.integers(-50, 300))}
    check_error_bounds(backend, [query, key, value], slopes, 2.0 ** -draw(st.integers(1, 24)), **options)


@pytest.mark.exhaustive_in_interpreter
def test_ranges_where_no_key_is_out_of_reach(backend):
    for queries, length, tolerance in ((5, 5, 0.0), (100, 100, 2**-24), (1, 600, 2**-24)):
        *_, ranges = forward(backend, inputs((queries, length)), STEEP / 100, 0, tolerance=tolerance)
        assert (ranges[..., 0::2] == 0).all()
        assert (ranges[..., 1::2] == length).all()
