"""Short rows, segments and packed sequences, which share tiles in the native backend."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.self_check.calls import differentiate
from tests.support.attention_cases import LAYOUTS, Case, PackedCase, cases, check_case
from tests.support.backends import needs_native
from tests.support.tiers import examples

pytestmark = [needs_native, pytest.mark.usefixtures("poisoned_memory")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@st.composite
def short_lengths(draw):
    queries = draw(st.integers(1, 16) | st.integers(17, 64))
    return queries, draw(st.sampled_from([queries, queries, min(64, queries + 3), max(1, queries - 2)]))


@examples(10)
@given(
    case=cases(
        short_lengths(),
        batch_size=st.sampled_from([1, 2, 3, 20]),
        head_dim=st.sampled_from([1, 5, 16, 33, 64, 80, 128, 200]),
    ),
    dtype=st.sampled_from(DTYPES),
)
def test_rows(case, dtype):
    check_case(case, "native", dtype=dtype, rounds_scores=True)


@examples(6)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=30),
    unused=st.sampled_from([0, 5, 130]),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**16),
)
@example([(1, 40), (2, 33), (1, 64), (1, 20), (3, 50)], 0, torch.float32, False, 0.0, 0)  # keys fill a tile first
def test_packed_sequences(lengths, unused, dtype, causal, dropout_p, seed):
    torch.manual_seed(seed)
    each = [pair[0] for pair in lengths], [pair[1] for pair in lengths]
    options = {"causal": causal, "dropout_p": dropout_p}
    check_case(PackedCase(each, unused, options, head_dim=24, slopes="by row"), "native", dtype=dtype)


def alibi_attention_with_lse(tensors, **options):
    return alibi_attention(*tensors, return_lse=True, skip_tolerance=0, backend="native", **options)


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_only_key_of_a_query(dropout_p):
    """Its weight is 1, so only the gradient of lse moves its score."""
    leaves = [torch.randn(300, 1, 1, 16, requires_grad=True) for _ in range(3)]
    query, key, _ = leaves
    grad_lse = torch.randn(300, 1, 1)
    torch.manual_seed(5)
    results = alibi_attention_with_lse([*leaves, torch.rand(1)], dropout_p=dropout_p)
    torch.autograd.backward(results, [torch.randn(query.shape), grad_lse])
    grad_score = grad_lse[..., None] / 4  # of the scale
    torch.testing.assert_close(query.grad, grad_score * key, rtol=1e-6, atol=0)
    torch.testing.assert_close(key.grad, grad_score * query, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("length", "layout"),
    [(1, "slice"), (3, "contiguous"), (8, "projection"), (20, "slice"), (40, "contiguous"), (64, "slice")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbors(layout, length, dtype):
    """Not even on NaN in them: all bits are those of the row alone."""
    batch_size, poisoned = 300 // length, 1
    tensors = [LAYOUTS[layout](torch.randn(batch_size, heads, length, 16).to(dtype)) for heads in (4, 2, 2)]
    grad_out = torch.randn(tensors[0].shape).to(dtype)
    for tensor in (*tensors, grad_out):
        tensor[poisoned] = float("nan")
    weights = grad_out, torch.randn(tensors[0].shape[:-1])

    def results_of(rows):
        leaves = [tensor[rows].detach().requires_grad_() for tensor in tensors]
        out, lse = alibi_attention(*leaves, return_lse=True, backend="native")
        loss = (out * weights[0][rows]).sum() + (lse * weights[1][rows]).sum()
        return out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)

    together = results_of(slice(None))
    for row in (0, poisoned, 2, batch_size - 1):
        for of_all, alone in zip(together, results_of(slice(row, row + 1)), strict=True):
            assert of_all[row].isnan().all() == (row == poisoned)
            if row != poisoned:
                assert torch.equal(of_all[row], alone[0])


#: Results of at least as many bytes are stored past the caches.
STREAMED = 2**19


@pytest.mark.parametrize(
    ("layout", "head_dim", "dtype"), list(zip(["contiguous", "projection", "slice"], (64, 16, 40), DTYPES, strict=True))
)
def test_large_results(layout, dtype, head_dim):
    batch_size = -(-STREAMED // (9 * 4 * head_dim * dtype.itemsize))
    check_case(Case({}, (9, 9), (4, 4), batch_size, head_dim, layout=layout), "native", dtype=dtype)


@pytest.mark.parametrize("sign", [-1, 1])
def test_scores_far_from_zero(sign):
    """About -1600 and 1600: exp of them is 0 and inf."""
    near_20 = 20 + torch.randn(2, 2, 9, 16) / 100
    tensors = near_20, sign * near_20, torch.randn(2, 2, 9, 16)
    results = alibi_attention(*tensors, return_lse=True, backend="native")
    expected = alibi_attention(*(tensor.double() for tensor in tensors), return_lse=True, backend="reference")
    for result, exact in zip(results, expected, strict=True):
        torch.testing.assert_close(result.double(), exact.double(), rtol=1e-3, atol=1e-3)


def in_new_thread(function):
    """Its kept memory is new, and filled with NaN."""
    with ThreadPoolExecutor(1) as executor:
        return executor.submit(function).result()


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize(("length", "dtype"), list(zip([3, 13, 21], DTYPES, strict=True)))
@pytest.mark.parametrize("start", [0, -2])  # of -2, the first two queries see no key
def test_memory_of_calls_before_changes_nothing(start, length, dtype, dropout_p):
    leaves = [torch.randn(5, heads, length, 20).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(leaves[0].shape), torch.randn(leaves[0].shape[:-1])

    def attend(tensors):
        torch.manual_seed(5)
        return alibi_attention_with_lse(tensors, dropout_p=dropout_p, query_start=start)

    first = differentiate(attend, leaves, weights)
    for result, again in zip(first, in_new_thread(lambda: differentiate(attend, leaves, weights)), strict=True):
        assert not result.isnan().any()
        assert torch.equal(result, again)


@pytest.mark.parametrize("length", [4, 100])
def test_keys_that_are_minus_infinity_have_no_weight(length):
    query, value = torch.ones(1, 2, length, 16), torch.randn(1, 2, length, 16)
    out, lse = alibi_attention_with_lse((query, torch.full_like(query, float("-inf")), value))
    assert (out == 0).all()
    assert (lse == float("-inf")).all()
