"""Few queries over many keys in the native backend: chunks of keys, merged, and what they skip."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.self_check.calls import RESULTS
from tests.support.backends import needs_native
from tests.support.kernels import Exact, check_attention
from tests.support.skipping import check_error_bounds, check_the_promise

pytestmark = [
    needs_native,
    pytest.mark.usefixtures("poisoned_memory"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LAYOUTS = ["heads first", "tokens first", "slice of a cache", "strided dims"]
NAN = float("nan")


def draw_cache(layout, batch_size, heads, length, head_dim, dtype):
    if layout == "tokens first":
        return torch.randn(batch_size, length, heads, head_dim).to(dtype).transpose(1, 2)
    if layout == "slice of a cache":
        cache = torch.full((batch_size + 1, heads + 1, length + 70, head_dim + 3), NAN)
        cache[1:, 1:, 30 : 30 + length, 1:-2] = torch.randn(batch_size, heads, length, head_dim)
        return cache.to(dtype)[1:, 1:, 30 : 30 + length, 1:-2]
    if layout == "strided dims":
        return torch.randn(batch_size, heads, head_dim, length).to(dtype).mT
    return torch.randn(batch_size, heads, length, head_dim).to(dtype)


def check_outputs(tensors, **options):
    """out and lse, beside the reference in float64."""

    def outputs_of(tensors, backend):
        torch.manual_seed(5)
        return alibi_attention(*tensors, return_lse=True, backend=backend, **options)

    exact = Exact(partial(outputs_of, backend="reference"), tensors)
    exact.check(RESULTS[:2], outputs_of(tensors, "native"), (tensors[0].dtype, torch.float32))


@settings(max_examples=60)
@given(data=st.data(), seed=st.integers(0, 2**16))
def test_everything(data, seed):
    torch.manual_seed(seed)
    draw = data.draw
    queries = draw(st.integers(1, 6), "queries")
    keys = draw(st.integers(65, 150) | st.sampled_from([511, 512, 513, 544, 1300]), "keys")
    batch_size = draw(st.integers(1, 3), "batch_size")
    heads, key_heads = draw(st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1), (20, 1), (10, 2)]), "heads")
    head_dim = draw(st.sampled_from([1, 5, 16, 17, 40, 64, 80, 128, 256]), "head_dim")
    dtype, layout = draw(st.sampled_from(DTYPES), "dtype"), draw(st.sampled_from(LAYOUTS), "layout")
    options = {"causal": draw(st.booleans(), "causal"), "dropout_p": draw(st.sampled_from([0.0, 0.3]), "p")}
    options["window"] = draw(st.sampled_from([None, None, 0, 3, 70, 600]), "window")
    start = draw(st.sampled_from(["end", "inside", "by row"]), "start")
    if start == "inside":
        options["query_start"] = draw(st.integers(-3, keys + 3), "query_start")
    if start == "by row":
        options["query_start"] = torch.randint(-3, keys + 3, (batch_size,))
    query = torch.randn(batch_size, heads, queries, head_dim).to(dtype)
    key, value = (draw_cache(layout, batch_size, key_heads, keys, head_dim, dtype) for _ in range(2))
    mask = draw(st.sampled_from([None, "random", "left", "right", "none"]), "mask")
    if mask is not None:
        length = torch.randint(0, keys, (batch_size, 1))
        index = torch.arange(keys).expand(batch_size, keys)
        shown = {
            "random": torch.rand(batch_size, keys) < 0.7, "left": index >= length, "right": index < length,
            "none": index < 0,
        }[mask]  # fmt: skip
        options["key_padding_mask"] = shown
        key, value = (tensor.masked_fill(~shown[:, None, :, None], NAN) for tensor in (key, value))
    slopes = torch.rand((batch_size, heads) if draw(st.booleans(), "slopes by row") else heads)
    slopes = (20 * slopes - 4) / keys  # all keys count, and a mask of the nearest keys costs no precision
    if draw(st.booleans(), "bound"):
        options["key_norm_bound"] = key.float().nan_to_num().norm(dim=-1).amax(-1)
    # A tolerance below the rounding of float32: what may be skipped is not seen in the results.
    check_outputs(
        [query, key, value, slopes], skip_tolerance=draw(st.sampled_from([0.0, 2.0**-30]), "tolerance"), **options
    )


def cache_of(keys=4000, heads=(4, 2), head_dim=32, queries=1, batch_size=2, dtype=torch.float32):
    query = torch.randn(batch_size, heads[0], queries, head_dim).to(dtype)
    return query, *(torch.randn(batch_size, heads[1], keys, head_dim).to(dtype) for _ in range(2))


def bound_of(key):
    return key.float().norm(dim=-1).amax(-1)


STEEP = torch.tensor([0.5, 0.25, 0.125, 0.0625])


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("tolerance", [2**-24, 1e-3, 0.1])
@pytest.mark.parametrize("causal", [True, False])
def test_skipping_keeps_its_promise(tolerance, causal, bounded):
    query, key, value = cache_of()
    bound = bound_of(key) if bounded else None
    options = {"causal": causal, "query_start": 1800, "key_norm_bound": bound}
    check_error_bounds("native", [query, key, value], STEEP, tolerance, **options)


@pytest.mark.parametrize("bounded", [False, True])
@pytest.mark.parametrize("causal", [True, False])
def test_the_worst_keys_weigh_no_more_than_the_tolerance(causal, bounded):
    check_the_promise("native", causal=causal, bounded=bounded)


def visited(key, value, query, **options):
    """For each key, whether NaN in it, and in its value, reaches the output."""
    found = []
    for tensor in (key, value):
        reaches = []
        for index in range(0, key.shape[2], 50):
            kept = tensor[:, :, index].clone()
            tensor[:, :, index] = NAN
            out = alibi_attention(query, key, value, backend="native", **options)
            reaches.append(bool(out.isnan().any()))
            tensor[:, :, index] = kept
        found.append(torch.tensor(reaches))
    return found


def test_values_out_of_reach_are_not_read_and_keys_only_with_a_bound():
    query, key, value = cache_of(heads=(1, 1), batch_size=1)
    slopes = torch.tensor([0.1])
    keys, values = visited(key, value, query, slopes=slopes)
    assert keys.all()
    assert values[-3:].all()
    assert not values[:-20].any()
    keys, values = visited(key, value, query, slopes=slopes, key_norm_bound=bound_of(key))
    assert keys[-3:].all()
    assert not keys[:-20].any()
    for options in ({"skip_tolerance": 0}, {"slopes": torch.zeros(1)}):
        keys, values = visited(key, value, query, **{"slopes": slopes, "key_norm_bound": bound_of(key), **options})
        assert keys.all()
        assert values.all()


@pytest.mark.parametrize("bounded", [False, True])
def test_a_huge_far_key_is_found(bounded):
    """Its score outweighs all penalties."""
    query, key, value = cache_of(heads=(4, 4), batch_size=1)
    key[:, :, 7] = 1000 * query[:, :, 0]
    bound = bound_of(key) if bounded else None
    out = alibi_attention(query, key, value, STEEP, key_norm_bound=bound, backend="native")
    torch.testing.assert_close(out[:, :, 0], value[:, :, 7])


def test_a_bound_that_is_nan_or_infinite_skips_no_key():
    query, key, value = cache_of()
    want = alibi_attention(query, key, value, STEEP, backend="native")
    for number in (NAN, float("inf")):
        bound = torch.full((2, 2), number)
        assert torch.equal(alibi_attention(query, key, value, STEEP, key_norm_bound=bound, backend="native"), want)


@pytest.mark.parametrize("layout", ["heads first", "tokens first"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(threads, dtype, layout):
    query = torch.randn(3, 4, 2, 64).to(dtype)
    key, value = (draw_cache(layout, 3, 2, 3000, 64, dtype) for _ in range(2))
    results = []
    for number in (1, 2, 5):
        threads(number)
        results.append(
            alibi_attention(query, key, value, key_norm_bound=bound_of(key), return_lse=True, backend="native")
        )
    for others in results[1:]:
        for first, second in zip(results[0], others, strict=True):
            assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_behind_the_position_and_beside_other_queries(dtype):
    """A preallocated cache, and queries that see different keys."""
    query, key, value = cache_of(keys=900, queries=3, dtype=dtype)
    want = alibi_attention(query, key[:, :, :703], value[:, :, :703], backend="native")
    for tensor in (key, value):
        tensor[:, :, 703:] = NAN
    out = alibi_attention(query, key, value, query_start=700, backend="native")
    torch.testing.assert_close(out, want)
    value[:, :, 702] = NAN
    out = alibi_attention(query, key, value, query_start=700, backend="native")
    assert torch.equal(out[:, :, :2], alibi_attention(query, key, value, query_start=700, backend="native")[:, :, :2])
    assert out[:, :, :2].isfinite().all()
    assert out[:, :, 2].isnan().all()


def test_nan_in_a_query_stays_in_its_row():
    query, key, value = cache_of(keys=700, heads=(4, 1), queries=2)
    query[1, 2, 0] = NAN
    out, lse = alibi_attention(query, key, value, key_norm_bound=bound_of(key), return_lse=True, backend="native")
    assert out[1, 2, 0].isnan().all()
    assert lse[1, 2, 0].isnan()
    assert out.isnan().sum() == out.shape[-1]


def test_a_decoding_step_with_gradients_of_all_inputs_and_skipped_keys():
    """Backward visits the keys that forward attended."""
    query, key, value = cache_of(keys=2000, queries=2)
    options = {"skip_tolerance": 2.0**-24, "key_norm_bound": bound_of(key)}

    def attend(tensors, backend):
        return alibi_attention(*tensors, return_lse=True, backend=backend, **options)

    results = check_attention("native", attend, [query, key, value, STEEP])
    grad_key = results[RESULTS.index("grad_key")]
    assert (grad_key[:, 0, :1700] == 0).all()  # weights of visited keys would not be zero yet
    assert (grad_key[:, :, -1] != 0).any()


def test_compiled_with_a_bound_that_changes():
    query, key, value = cache_of(keys=600)
    compiled = torch.compile(partial(alibi_attention, backend="native"), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        bound = bound_of(key)
        out = compiled(query, key, value, key_norm_bound=bound)
        assert torch.equal(out, alibi_attention(query, key, value, key_norm_bound=bound, backend="native"))
        key = 2 * key


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
