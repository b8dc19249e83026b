"""The Gluon kernels of attention on CPU threads: results against float64, and what their barriers are for.

The public function launches them by their own host side. Tiles are small: a program has 32 queries or keys.
"""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hypothesis import assume, given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops.alibi_attention.triton_configurations import GluonTiles
from seqwarm_kernels.self_check.calls import differentiate
from tests.support.attention_cases import Case, a_third_of, check_case
from tests.support.backends import SHARES_FIXTURES, needs_interpreter
from tests.support.dense import distance_and_visibility
from tests.support.gluon_attention import KERNELS, Hopper, Launched
from tests.support.kernels import check_extreme_slopes
from tests.support.tiers import examples, first_fast

pytestmark = [needs_interpreter(), pytest.mark.usefixtures("poisoned_memory")]


@pytest.fixture
def hopper(monkeypatch):
    return Hopper(monkeypatch)


def small(options=None, lengths=(53, 53), heads=(2, 1), batch_size=1, **more):
    return Case(options or {}, lengths, heads, batch_size, **more)


#: Of the grid, calls that take all three kernels. Options are combined at random below.
ROWS = {
    name: a_third_of(name)
    for name in (
        *("causal", "huge slopes", "expanded keys"),
        *("full", "segments of 20, full", "segments of 100, full"),
        *("tiny slopes", "slopes of zero", "negative slopes and scale", "a slope for each row"),
        *("tokens outside of heads", "one tensor for all three"),
    )
} | {
    "33 tokens, two rows": small(lengths=(33, 33), batch_size=2),
    "one token": small(lengths=(1, 1)),
    "one query": small({"causal": False}, lengths=(1, 53)),
    "31 tokens": small(lengths=(31, 31), heads=(4, 2)),
    "queries in the midst": small({"query_start": 20, "causal": False}, lengths=(40, 75)),
    "head_dim 32": small(head_dim=32),
}
#: Calls in which some queries may see no key, or meet none of their position: only forward takes its kernel.
FORWARD_ROWS = {
    "queries beyond the keys": small({"query_start": 70}, slopes=0.3),
    "more queries than keys": small(lengths=(75, 40)),
    "a start before all keys": small({"query_start": torch.tensor([-(2**40), 0]), "causal": False}, batch_size=2),
    "starts in a tensor": small({"query_start": torch.tensor([-300, 60]), "causal": False}, batch_size=2),
    "one start in a tensor": small({"query_start": torch.tensor(10), "causal": False}, batch_size=2),
    "more queries than keys, full": small({"causal": False}, lengths=(75, 40)),
    "queries before the keys": small({"query_start": -60, "causal": False}, slopes=0.3),
    "queries far beyond the keys": small({"query_start": 2**60}, slopes=3 / 2**60),
    "queries far before the keys": small(
        {"query_start": torch.tensor(-(2**45) - 1), "causal": False}, slopes=3 / 2**45
    ),
}
FAST = {"causal", "huge slopes", "expanded keys", "33 tokens, two rows"}
FAST |= {"queries far beyond the keys", "queries far before the keys"}

#: Keys of forward, its stages, keys of the second kernel, queries of the third, its stages.
OTHER_TILES = {"8 and 32": GluonTiles(8, 3, 0, 0, 32, 8, 3, 0), "32 and 8": GluonTiles(32, 2, 0, 0, 8, 32, 2, 0)}


def check(hopper, case, kernels=KERNELS, dtype=torch.float32):
    hopper.launched.clear()
    check_case(case, "triton", dtype=dtype)
    assert list(hopper.launched) == kernels


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in ROWS | FORWARD_ROWS]
)
def test_rows(hopper, name):
    check(hopper, (ROWS | FORWARD_ROWS)[name], KERNELS if name in ROWS else KERNELS[:1])


def test_half_precision(hopper):
    """Products take float32 here. The host side is that of 16-bit tensors."""
    check(hopper, small({"causal": False}, (40, 70), (1, 1)), dtype=torch.float16)


@pytest.mark.parametrize("tiles", OTHER_TILES)
@pytest.mark.parametrize(
    "case",
    first_fast([small({"causal": False}, (70, 70)), small({"segment_length": 48, "window": 21}, (90, 90))]),
    ids=str,
)
def test_other_tiles(hopper, tiles, case):
    hopper.use(OTHER_TILES[tiles])
    check(hopper, case)


@st.composite
def calls(draw):
    """A case, tiles, the number of programs, and a seed."""
    queries = draw(st.integers(1, 80))
    keys = queries + draw(st.sampled_from([0, 0, 1, 15, 32, 50]))
    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window"] = draw(st.integers(0, keys))
    if queries == keys and draw(st.booleans()):
        options["segment_length"] = draw(st.integers(1, keys + 1))
    if queries < keys and draw(st.booleans()):
        options["query_start"] = draw(st.integers(0, keys - queries))
    case = small(
        options,
        lengths=(queries, keys),
        heads=draw(st.sampled_from([(1, 1), (2, 1), (4, 2), (3, 3)])),
        batch_size=draw(st.integers(1, 2)),
        slopes=draw(st.sampled_from([None, 0.0, 1e-6, 0.3, -0.1])),
    )
    size, stages = st.sampled_from([8, 16, 32]), st.integers(2, 3)
    assume(distance_and_visibility(1, queries, keys, **options)[1].any(1).all())  # a query sees each key
    tiles = GluonTiles(draw(size), draw(stages), 0, 0, draw(size), draw(size), draw(stages), 0)
    return case, tiles, draw(st.integers(1, 5)), draw(st.integers(0, 9))


@examples(2, **SHARES_FIXTURES)
@given(call=calls())
def test_results_of_any_call(hopper, call):
    case, *how = call
    torch.manual_seed(0)
    hopper.use(*how)
    check(hopper, case)


@pytest.mark.parametrize(
    ("slope", "causal"),
    first_fast([(3e38, True), (-1e7, False), (3e36, False), (-100.0, True)]),
)
def test_extreme_slopes(hopper, slope, causal):
    """The keys that have all the weight are in tiles that every query sees."""
    check_extreme_slopes("triton", slope, causal=causal, queries=70, keys=70)


@pytest.mark.parametrize(
    ("lengths", "options", "taken"),
    [
        ((20, 33), {"window": 13}, KERNELS),
        ((33, 20), {}, KERNELS[:1]),
        ((20, 33), {"query_start": 14}, KERNELS[:1]),
        ((20, 33), {"query_start": 12}, []),
        ((20, 33), {"query_start": -1}, []),
        ((20, 33), {"query_start": torch.tensor(13)}, []),
        ((20, 33), {"window": 12}, []),
    ],
)
def test_kernels_are_of_calls_in_which_tokens_see_one_another(hopper, lengths, options, taken):
    """Forward where a query sees each key. Gradients also need each query to see a key."""
    leaves, attend = small(options, lengths=lengths, heads=(1, 1)).call()
    out, _ = attend([leaf.requires_grad_() for leaf in leaves], "triton")
    out.sum().backward()
    assert list(hopper.launched) == taken


@pytest.mark.parametrize("causal", [True, False])
def test_nan_reaches_the_results_of_its_query_alone(hopper, causal):
    query, key, value = torch.randn(3, 1, 1, 60, 16)
    query[0, 0, 40, 3] = float("nan")
    for result in alibi_attention(query, key, value, causal=causal, return_lse=True, backend="triton"):
        assert result[0, 0, 40].isnan().all()
        assert result[0, 0, torch.arange(60) != 40].isfinite().all()


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("tiles", first_fast(OTHER_TILES))
@pytest.mark.parametrize("causal", [True, False])
def test_tiles_that_are_skipped(hopper, skipping_of_few_keys, causal, tiles):
    hopper.use(OTHER_TILES[tiles])
    leaves = [torch.randn(1, heads, 110, 16) for heads in (2, 1, 1)]
    leaves.append(torch.tensor([3.0, 1.0]))
    weights = torch.randn(1, 2, 110, 16), torch.randn(1, 2, 110)

    def results_of(backend, leaves):
        options = {"causal": causal, "return_lse": True, "skip_tolerance": 2**-24, "backend": backend}
        return differentiate(lambda given: alibi_attention(*given, **options), leaves, weights)

    found = results_of("triton", [leaf.clone().requires_grad_() for leaf in leaves])
    expected = results_of("reference", [leaf.double().requires_grad_() for leaf in leaves])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5, check_dtype=False)
    begin, end = hopper.launched[KERNELS[0]].tensors["ranges"].unflatten(-1, (-1, 2)).unbind(-1)
    assert begin[..., -1].min() > 40
    assert causal or end[..., 0].max() < 70


def test_keys_in_reach_of_one_consumer(hopper, skipping_of_few_keys):
    """The last 16 queries of each 32 meet one key far away whose score exceeds those of all near ones. Both consumers
    go as far."""
    query = torch.zeros(1, 1, 128, 16)
    query[:, :, torch.arange(128) % 32 >= 16] = 1.0
    key = torch.full((1, 1, 128, 16), -5.0)
    key[:, :, 10] = 5.0
    tensors = query, key, torch.randn(1, 1, 128, 16), torch.tensor([0.3])
    out = alibi_attention(*tensors, skip_tolerance=2**-24, backend="triton")
    torch.testing.assert_close(out, alibi_attention(*tensors, backend="reference"), rtol=1e-4, atol=1e-4)
    assert not hopper.launched[KERNELS[0]].tensors["ranges"][0, 0, ::2].any()


def test_the_fewest_stages(hopper):
    """With fewer, consumers and the producer would wait for each other."""
    check(hopper, small())
    forward, query, key = hopper.launched.values()
    too_few = (forward, "STAGES", 1), (query, "K_STAGES", 2), (query, "V_STAGES", 1), (key, "STAGES", 1)
    for launched, name, stages in too_few:
        fewer = Launched(launched.kernel, launched.programs, launched.arguments | {name: stages})
        with pytest.raises(AssertionError, match="while it waits for the next"):
            fewer.run(seed=0)


def test_no_schedule_changes_a_bit_of_the_results(hopper):
    """Of kernels with 6 tiles, where one program draws at least 3 works after its own."""
    hopper.use(multiprocessors=1)
    leaves, attend = small({"causal": False}, (70, 70), (2, 2)).call()
    out, lse = attend([leaf.requires_grad_() for leaf in leaves], "triton")
    torch.autograd.backward((out, lse), (torch.randn_like(out), torch.randn_like(lse)))
    for name, launched in hopper.launched.items():
        assert launched.arguments["num_works"] >= 4
        expected = launched.contents()
        for seed in (1, 2):
            launched.run(seed)
            found = launched.contents()
            assert all(torch.equal(found[each].nan_to_num(-7), expected[each].nan_to_num(-7)) for each in expected), (
                name
            )
