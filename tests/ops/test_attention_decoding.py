"""Few queries over many keys: chunks of keys, merged, and what they skip."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.self_check.calls import RESULTS
from tests.support.attention_cases import LAYOUTS, cases, check_case
from tests.support.backends import implementations, needs_native, served
from tests.support.kernels import DEVICES, TRITON_RUNS, check_attention, check_extreme_slopes
from tests.support.skipping import check_the_promise
from tests.support.tiers import examples, first_fast

pytestmark = pytest.mark.usefixtures("poisoned_memory")
on_each_backend = pytest.mark.parametrize(
    ("backend", "device"),
    [pytest.param(*each.values[0], marks=each.marks) for each in served("alibi_attention", without="reference")],
)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN = float("nan")


@needs_native
@examples(8)
@given(
    case=cases(
        st.tuples(st.integers(1, 6), st.integers(65, 150) | st.sampled_from([512, 513, 544, 1100])),
        heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1), (20, 1), (10, 2)]),
        head_dim=st.sampled_from([1, 5, 17, 40, 80, 256]),
        slopes=st.sampled_from(["flat", "flat by row", 0.0]),
        bounded=st.booleans(),
    ),
    dtype=st.sampled_from(DTYPES),
    tolerance=st.sampled_from([0.0, 2.0**-30]),
)
def test_everything(case, dtype, tolerance):
    """A tolerance below the rounding of float32 skips what is not seen in the results."""
    case = replace(case, options={**case.options, "skip_tolerance": tolerance})
    check_case(case, "native", dtype=dtype, rounds_scores=True)


def cache_of(keys=4000, heads=(4, 2), head_dim=32, queries=1, batch_size=2, dtype=torch.float32, device="cpu"):
    shapes = (heads[0], queries), (heads[1], keys), (heads[1], keys)
    return [torch.randn(batch_size, *shape, head_dim, device=device).to(dtype) for shape in shapes]


def bound_of(key):
    return key.float().nan_to_num().norm(dim=-1).amax(-1)


STEEP = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize(
    ("causal", "bounded"),
    first_fast([(False, True), (False, False), (True, True), (True, False)], "slow_in_interpreter"),
)
@on_each_backend
def test_the_worst_keys_weigh_no_more_than_the_tolerance(backend, device, causal, bounded):
    check_the_promise(backend, causal=causal, bounded=bounded, device=device)


@on_each_backend
def test_values_out_of_reach_are_not_read_and_keys_only_with_a_bound(backend, device):
    query, key, value = cache_of(520, (1, 1), 16, batch_size=1, device=device)
    slopes, bound = torch.tensor([0.3], device=device), bound_of(key)

    def is_read(tensor, index, slopes=slopes, **options):
        kept = tensor[0, 0, index].clone()
        tensor[0, 0, index] = NAN
        out = alibi_attention(query, key, value, slopes, backend=backend, **options)
        tensor[0, 0, index] = kept
        return bool(out.isnan().any())

    assert is_read(key, 510)
    assert is_read(value, 510)
    assert is_read(key, 50)
    assert not is_read(value, 50)
    assert is_read(value, 50, skip_tolerance=0)
    assert not is_read(key, 50, key_norm_bound=bound)
    assert is_read(key, 50, key_norm_bound=bound, skip_tolerance=0)
    assert is_read(key, 50, key_norm_bound=bound, slopes=0 * slopes)
    assert is_read(key, 50, key_norm_bound=bound * NAN)
    assert is_read(key, 50, key_norm_bound=bound * float("inf"))


@pytest.mark.parametrize("bounded", [False, True])
@on_each_backend
def test_a_huge_far_key_is_found(backend, device, bounded):
    """Its score outweighs all penalties."""
    query, key, value = cache_of(520, (1, 1), 16, batch_size=1, device=device)
    key[:, :, 7] = 1000 * query[:, :, 0]
    bound = bound_of(key) if bounded else None
    out = alibi_attention(query, key, value, STEEP[:1].to(device), key_norm_bound=bound, backend=backend)
    torch.testing.assert_close(out[:, :, 0], value[:, :, 7])


@on_each_backend
def test_keys_in_reach_of_large_scores(backend, device):
    """All keys score 25, and the slope is flat: none is out of reach."""
    query, key = torch.full((1, 1, 1, 16), 2.5, device=device), torch.full((1, 1, 900, 16), 2.5, device=device)
    tensors = query, key, torch.randn(1, 1, 900, 16, device=device), torch.tensor([0.01], device=device)
    out, exact = (
        alibi_attention(*tensors, key_norm_bound=bound_of(key), backend=each) for each in (backend, "reference")
    )
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)


@TRITON_RUNS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slope", first_fast([3e38, -1e7]))
def test_one_key_has_all_the_weight_in_triton(slope, device):
    """The nearest one or the farthest."""
    check_extreme_slopes("triton", slope, queries=1, keys=700, device=device)


@needs_native
@pytest.mark.parametrize("layout", ["contiguous", "projection"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(threads, dtype, layout):
    query = torch.randn(3, 4, 2, 64).to(dtype)
    key, value = (LAYOUTS[layout](torch.randn(3, 2, 3000, 64).to(dtype)) for _ in range(2))
    results = []
    attend = partial(alibi_attention, key_norm_bound=bound_of(key), return_lse=True, backend="native")
    for number in (1, 5):
        threads(number)
        results.append(attend(query, key, value))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("backend", "device", "dtype"), implementations())
def test_nan_reaches_only_the_queries_that_see_it(backend, device, dtype):
    query, key, value = cache_of(520, (4, 1), queries=3, dtype=dtype, device=device)
    expected = torch.zeros(2, 4, 3, 1, dtype=torch.bool)
    query[1, 2, 0], expected[1, 2, 0] = NAN, True
    if backend == "native":  # products of tiles also reach queries with a weight of 0
        value[:, :, -1], expected[:, :, 2] = NAN, True  # the last query sees it
    out, lse = alibi_attention(query, key, value, key_norm_bound=bound_of(key), return_lse=True, backend=backend)
    assert lse.isnan().nonzero().tolist() == [[1, 2, 0]]
    assert torch.equal(out.isnan().cpu(), expected.expand_as(out))


@needs_native
def test_a_decoding_step_with_gradients_of_all_inputs_and_skipped_keys():
    """Backward visits the keys that forward attended."""
    query, key, value = cache_of(keys=2000, queries=2)
    options = {"skip_tolerance": 2.0**-24, "key_norm_bound": bound_of(key)}

    def attend(tensors, backend, **changes):
        return alibi_attention(*tensors, return_lse=True, backend=backend, **options, **changes)

    results = check_attention("native", attend, [query, key, value, STEEP])
    grad_key = results[RESULTS.index("grad_key")]
    assert (grad_key[:, 0, :1700] == 0).all()  # weights of visited keys would not be zero yet
    assert (grad_key[:, :, -1] != 0).any()


@needs_native
def test_known_calls_take_each_bound():
    """The bound is an argument of every call and not remembered with its kind."""
    query, key, value = cache_of()
    key[:, :, 0] = NAN
    for bound in (10.0, float("inf"), 10.0):
        out = alibi_attention(query, key, value, STEEP, key_norm_bound=torch.full((2, 2), bound), backend="native")
        assert out.isfinite().all() == (bound == 10.0)


@pytest.mark.parametrize(
    ("error", "bound"),
    [
        (TypeError, 3.0),
        (TypeError, torch.ones(2, 2).double()),
        (ValueError, torch.ones(2)),
        (ValueError, torch.ones(2, 4)),
        (ValueError, torch.ones(2, 2, device="meta")),
    ],
)
def test_bounds_that_do_not_fit(error, bound):
    with pytest.raises(error, match="key_norm_bound"):
        alibi_attention(*cache_of(keys=100), key_norm_bound=bound)
