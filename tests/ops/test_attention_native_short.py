"""Short rows, segments and packed sequences, which share tiles in the native backend."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention, alibi_attention_varlen
from seqwarm_kernels.self_check.calls import differentiate
from tests.support.attention_cases import draw_tensor
from tests.support.backends import needs_native
from tests.support.kernels import check_attention

pytestmark = [
    needs_native,
    pytest.mark.usefixtures("poisoned_memory"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["heads first", "tokens first", "strided"]


def alibi_attention_with_lse(tensors, backend, **options):
    return alibi_attention(*tensors, return_lse=True, skip_tolerance=0, backend=backend, **options)


@settings(max_examples=40)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_rows(data, seed):
    torch.manual_seed(seed)
    length = data.draw(st.integers(1, 16) | st.integers(17, 64), "length")
    batch_size = data.draw(st.integers(1, max(1, min(300, 600 // length))), "batch_size")
    heads, key_heads = data.draw(st.sampled_from([(1, 1), (2, 2), (4, 2), (3, 1)]), "heads")
    head_dim = data.draw(st.sampled_from([1, 5, 16, 33, 64]), "head_dim")
    dtype, layout = data.draw(st.sampled_from(DTYPES), "dtype"), data.draw(st.sampled_from(LAYOUTS), "layout")
    key_length = data.draw(st.sampled_from([length, length, min(64, length + 3), max(1, length - 2)]), "key_length")
    options = {"causal": data.draw(st.booleans(), "causal"), "dropout_p": data.draw(st.sampled_from([0.0, 0.3]), "p")}
    options["window"] = data.draw(st.sampled_from([None, 0, 3, 40]), "window")
    if key_length == length and data.draw(st.booleans(), "segments"):
        options["segment_length"] = data.draw(st.integers(1, 20), "segment_length")
    elif data.draw(st.booleans(), "own positions"):
        options["query_start"] = torch.randint(-3, key_length + 3, (batch_size,))
    query = draw_tensor(layout, batch_size, heads, length, head_dim, dtype=dtype)
    key, value = (draw_tensor(layout, batch_size, key_heads, key_length, head_dim, dtype=dtype) for _ in range(2))
    if data.draw(st.booleans(), "mask"):
        mask = torch.rand(batch_size, key_length) < 0.7
        options["key_padding_mask"] = mask
        key, value = (t.masked_fill(~mask[:, None, :, None], float("nan")) for t in (key, value))
    slopes = torch.rand(batch_size, heads) if data.draw(st.booleans(), "slopes by row") else torch.rand(heads) - 0.2
    check_attention("native", partial(alibi_attention_with_lse, **options), [query, key, value, slopes])


@pytest.mark.parametrize("head_dim", [80, 128, 200])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_large_heads(dtype, head_dim):
    """Products of rows that are wider than a block of registers."""
    query, key, value = (draw_tensor("tokens first", 3, heads, 24, head_dim, dtype=dtype) for heads in (2, 1, 1))
    check_attention("native", partial(alibi_attention_with_lse, causal=True), [query, key, value, torch.rand(2)])


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_the_only_key_of_a_query(dropout_p):
    """Its weight is 1, so only the gradient of lse moves its score."""
    leaves = [torch.randn(300, 1, 1, 16, requires_grad=True) for _ in range(3)]
    query, key, _ = leaves
    grad_lse = torch.randn(300, 1, 1)
    torch.manual_seed(5)
    results = alibi_attention_with_lse([*leaves, torch.rand(1)], "native", dropout_p=dropout_p)
    torch.autograd.backward(results, [torch.randn(query.shape), grad_lse])
    grad_score = grad_lse[..., None] / 4  # of the scale
    torch.testing.assert_close(query.grad, grad_score * key, rtol=1e-6, atol=0)
    torch.testing.assert_close(key.grad, grad_score * query, rtol=1e-6, atol=0)


@pytest.mark.parametrize("length", [5, 8, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_position", [False, True])
def test_rows_that_see_no_key(by_position, dtype, length):
    """Between rows that do. No product has their keys as rows, and none may write past the last sum of a group."""
    tensors = [draw_tensor("heads first", 3, 2, length, 64, dtype=dtype) for _ in range(3)]
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[1:] = by_position
    start = torch.tensor([0, -length, -length]) if by_position else None
    attend = partial(alibi_attention_with_lse, key_padding_mask=mask, query_start=start)
    check_attention("native", attend, [*tensors, torch.rand(2)])


@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=60),
    rest=st.sampled_from([0, 5, 130]),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    dropout_p=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**16),
)
def test_packed_sequences(lengths, rest, dtype, causal, dropout_p, seed):
    """`rest` tokens belong to no sequence."""
    torch.manual_seed(seed)
    ends_q, ends_k = (torch.tensor([0, *(pair[of] for pair in lengths)]).cumsum(0).int() for of in (0, 1))
    query = torch.randn(int(ends_q[-1]) + rest, 4, 24).to(dtype)
    key, value = (torch.randn(int(ends_k[-1]) + rest, 2, 24).to(dtype) for _ in range(2))
    slopes = torch.rand(len(lengths), 4)
    longest = [max((pair[of] for pair in lengths), default=0) for of in (0, 1)]

    def attend(tensors, backend):
        *tensors, slopes = tensors
        return alibi_attention_varlen(
            *tensors, ends_q, ends_k, *longest, slopes, causal=causal, dropout_p=dropout_p, return_lse=True,
            skip_tolerance=0, backend=backend,
        )  # fmt: skip

    check_attention("native", attend, [query, key, value, slopes])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("length", [1, 3, 8, 16, 20, 32, 40, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_its_neighbors(layout, length, dtype):
    """Not even on NaN in them: all bits are those of the row alone."""
    batch_size, poisoned = 300 // length, 1
    tensors = [draw_tensor(layout, batch_size, heads, length, 16, dtype=dtype) for heads in (4, 2, 2)]
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


@pytest.mark.parametrize("head_dim", [64, 32, 16, 40])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_results_have_the_bits_of_small_ones(layout, dtype, head_dim):
    length, heads = 9, 4
    batch_size = -(-STREAMED // (length * heads * head_dim * dtype.itemsize))
    leaves = [draw_tensor(layout, batch_size, heads, length, head_dim, dtype=dtype).requires_grad_() for _ in range(3)]
    grad_out = draw_tensor(layout, batch_size, heads, length, head_dim, dtype=dtype)

    def results(rows):
        tensors = [leaf[rows] for leaf in leaves]
        out = alibi_attention(*tensors, backend="native")
        return out, *torch.autograd.grad(out, tensors, grad_out[rows])

    large = results(slice(None))
    assert large[0].nbytes >= STREAMED
    small = [results(slice(start, start + 8)) for start in range(0, batch_size, 8)]
    for result, parts in zip(large, zip(*small, strict=True), strict=True):
        assert torch.equal(result, torch.cat(parts))


def test_packed_sequences_equal_rows():
    """To the last bit, and a batch of rows equals one row of segments."""
    batch_size, length = 37, 9
    rows = [torch.randn(batch_size, length, heads, 32).transpose(1, 2) for heads in (4, 2, 2)]
    ends = torch.arange(0, (batch_size + 1) * length, length, dtype=torch.int32)
    packed = [tensor.transpose(1, 2).flatten(0, 1) for tensor in rows]
    long_row = [tensor.transpose(0, 1)[None] for tensor in packed]
    want = alibi_attention(*rows, backend="native").transpose(1, 2).flatten(0, 1)
    got = alibi_attention_varlen(*packed, ends, ends, length, length, backend="native")
    segments = alibi_attention(*long_row, segment_length=length, backend="native")[0].transpose(0, 1)
    assert torch.equal(got, want)
    assert torch.equal(segments, want)


@pytest.mark.parametrize("length", [8, 40, 70])
def test_a_hidden_row_whose_queries_hold_nan(length):
    query, key, value = (torch.randn(2, 1, length, 8) for _ in range(3))
    query[0] = float("nan")
    mask = torch.tensor([False, True])[:, None].expand(2, length)
    out, lse = alibi_attention(query, key, value, key_padding_mask=mask, return_lse=True, backend="native")
    assert (out[0] == 0).all()
    assert (lse[0] == float("-inf")).all()
    assert out[1].isfinite().all()


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
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 7, 13, 21])
@pytest.mark.parametrize("start", [0, -2])  # of -2, the first two queries see no key
def test_memory_of_calls_before_changes_nothing(start, length, dtype, dropout_p):
    leaves = [torch.randn(5, heads, length, 20).to(dtype).requires_grad_() for heads in (4, 2, 2)]
    weights = torch.randn(leaves[0].shape), torch.randn(leaves[0].shape[:-1])

    def attend(tensors):
        torch.manual_seed(5)
        return alibi_attention_with_lse(tensors, "native", dropout_p=dropout_p, query_start=start)

    first = differentiate(attend, leaves, weights)
    for result, again in zip(first, in_new_thread(lambda: differentiate(attend, leaves, weights)), strict=True):
        assert not result.isnan().any()
        assert torch.equal(result, again)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [4, 100])
def test_keys_that_are_minus_infinity_have_no_weight(length, dtype):
    query, value = torch.ones(1, 2, length, 16, dtype=dtype), torch.randn(1, 2, length, 16).to(dtype)
    out, lse = alibi_attention_with_lse((query, torch.full_like(query, float("-inf")), value), "native")
    assert (out == 0).all()
    assert (lse == float("-inf")).all()


def test_tokens_an_odd_number_of_elements_apart():
    """Pairs of bfloat16 are not read in place there."""
    leaves = [torch.randn(3, 2, 16, 65).bfloat16()[..., :64] for _ in range(3)]
    check_attention("native", alibi_attention_with_lse, [*leaves, torch.rand(2)])
