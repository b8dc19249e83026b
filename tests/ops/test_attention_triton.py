"""Triton's attention kernels with small tiles: short rows of one head reach every loop, in a second each."""

from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.ops import backends
from tests.ops import test_attention_kernels as dense
from tests.ops import test_attention_kernels_varlen as packed
from tests.support.attention_cases import Case
from tests.support.kernels import check_extreme_slopes
from tests.support.tiers import first_fast

pytestmark = [
    pytest.mark.skipif(
        backends.why_not("alibi_attention", "triton", "cpu", torch.float32) is not None,
        reason="Triton does not serve its interpreter here",
    ),
    pytest.mark.usefixtures("poisoned_memory", "small_tiles"),
]


@pytest.fixture
def small_tiles(monkeypatch):
    from seqwarm_kernels.ops.alibi_attention import triton as host
    from seqwarm_kernels.ops.alibi_attention.triton_configurations import Configuration, Tiles

    tiles = Configuration(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2))
    monkeypatch.setattr(host, "configuration", lambda *_, **__: tiles)
    host._known.clear()
    yield
    host._known.clear()


@pytest.mark.parametrize("allowed", ["ieee", "tf32"])
def test_products_of_float32_take_tf32_only_if_torch_allows_it(monkeypatch, allowed):
    from triton.runtime.interpreter import InterpreterBuilder

    dot, precisions = InterpreterBuilder.create_dot, set()

    def noted(self, left, right, total, precision, *rest):
        precisions.add(precision.name.lower())
        return dot(self, left, right, total, precision, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", noted)
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision=allowed))
    for queries, keys in ((33, 33), (1, 512)):  # the second is decoding
        tensors = [torch.randn(1, 1, length, 16, requires_grad=True) for length in (queries, keys, keys)]
        alibi_attention(*tensors, causal=False, backend="triton").sum().backward()
    assert precisions == {allowed}


def small(options=None, lengths=(50, 70), heads=(2, 1), batch_size=1, **more):
    return Case(options or {}, lengths=lengths, heads=heads, batch_size=batch_size, **more)


CASES = {
    "causal": small(),
    "full": small({"causal": False}),
    "everything": small(
        {"causal": False, "window": 20, "segment_length": 30, "dropout_p": 0.2, "scale": 0.3},
        lengths=(60, 60),
        slopes=(1, 2),
        mask="random",
        layout="projection",
    ),
    "mask": small(mask="random", batch_size=2),
    "window": small({"window": 25}),
    "window, full": small({"window": 25, "causal": False}),
    "segments": small({"segment_length": 33}, lengths=(70, 70)),
    "dropout": small({"dropout_p": 0.3}),
    "starts in a tensor": small({"query_start": torch.tensor([-40, 60]), "causal": False}, batch_size=2),
    "more queries than keys": small(lengths=(90, 40)),
    # Biases are large, and equal up to that of the nearest key.
    "queries far before the keys": small({"causal": False}, lengths=(300, 20), slopes=0.9),
    "queries far beyond the keys": small({"query_start": 0}, lengths=(300, 20), slopes=0.9),
    "head_dim 3": small({"causal": False}, head_dim=3),
    "huge slopes": small(slopes=1e4),
    "strided dims": small(layout="strided", heads=(4, 2)),
}


#: As those of the grid of packed sequences.
PACKED_CASES = {
    "causal": ([30, 0, 20], [40, 5, 10], 9, {}),
    "full": ([50, 20], [30, 45], 9, {"causal": False, "window": 25, "dropout_p": 0.3}),
    "rows without keys in a tile": ([3, 29], [0, 90], 9, {}),
    "far fewer keys": ([400, 70], [20, 1], 0, {"causal": False}),
}


@pytest.mark.parametrize("name", first_fast(CASES))
def test_rows(name):
    dense.check_case("triton", "cpu", torch.float32, CASES[name])


@pytest.mark.parametrize("name", first_fast(PACKED_CASES))
def test_packed_sequences(name):
    packed.check_case("triton", "cpu", torch.float32, PACKED_CASES[name], by_sequence=name == "full")


@pytest.mark.parametrize(
    ("slope", "hides_nearest", "causal"),
    first_fast(
        [
            (-1e7, False, False),
            (-100.0, False, True),
            (1e4, True, True),
            (1e7, True, False),
            (3e36, False, False),
            (3e38, False, True),
        ]
    ),
)
def test_extreme_slopes(slope, hides_nearest, causal):
    check_extreme_slopes("triton", slope, causal=causal, hides_nearest=hides_nearest, queries=130, keys=130)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "full"])
def test_bulk_copies(name):
    """The interpreter loads tiles of float16 as GPUs with bulk copies do."""
    dense.check_case("triton", "cpu", torch.float16, CASES[name])
    packed.check_case("triton", "cpu", torch.float16, PACKED_CASES[name], by_sequence=name == "full")


def test_one_number():
    query, key, value = torch.randn(3, 1, 1, 1, 1)
    assert torch.equal(alibi_attention(query, key, value, backend="triton"), value)


@pytest.fixture
def skipping(monkeypatch):
    from seqwarm_kernels.ops.alibi_attention import triton_ranges as host

    monkeypatch.setattr(host, "MIN_KEYS_TO_SKIP", 16)
    monkeypatch.setattr(host, "MIN_QUERIES_TO_SKIP", 1)


def check_within_reach(key, slope, **options):
    """With a head before that reaches less far."""
    query = torch.ones_like(key).repeat(1, 2, 1, 1)
    leaves = [tensor.requires_grad_() for tensor in (query, key, torch.randn_like(key))]
    weights = torch.randn_like(query)
    results = []
    for backend in ("triton", "reference"):
        out = alibi_attention(*leaves, torch.tensor([8.0, slope]), backend=backend, **options)
        results.append([out, *torch.autograd.grad((out * weights).sum(), leaves)])
    tolerance = 1e-3 if key.dtype == torch.float32 else 1e-2
    for result, exact in zip(*results, strict=True):
        torch.testing.assert_close(result, exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", first_fast([True, False]))
def test_no_key_is_skipped_because_another_row_masks_it(skipping, causal):
    key = torch.randn(2, 1, 128, 16) / 100
    key[:, :, 0] = 20  # a score of 80, less 63 at the far end
    mask = torch.ones(2, 128, dtype=torch.bool)
    mask[0, 0] = False
    check_within_reach(key, 0.5, causal=causal, key_padding_mask=mask)


@pytest.mark.parametrize("causal", first_fast([True, False]))
def test_keys_that_weigh_as_much_as_near_ones_are_in_reach(skipping, causal):
    check_within_reach(torch.zeros(1, 1, 128, 16), 0.1, causal=causal)


@pytest.mark.parametrize("causal", first_fast([False, True]))
def test_keys_whose_scores_exceed_negative_ones_are_in_reach(skipping, causal):
    key = torch.full((1, 1, 128, 16), -5.0)  # scores of -20
    key[:, :, 40] = 5.0
    check_within_reach(key, 0.5, causal=causal)


@pytest.mark.parametrize("causal", first_fast([True, False]))
@pytest.mark.parametrize(
    ("dtype", "near", "far", "slope"),
    [
        pytest.param(torch.float32, 1.0, 2.0, 0.1, id="bounded"),
        pytest.param(torch.float32, 0.0, 100.0, 0.01, id="a large score"),
        pytest.param(torch.float16, -10.0, 10.0, 0.01, id="scores in float16"),
        pytest.param(torch.float32, 0.0, 0.0, -2.0, id="a negative slope"),
    ],
)
def test_weights_do_not_overflow(skipping, dtype, near, far, slope, causal):
    """Where norms bound the scores of far keys, weights count from the largest score near the queries."""
    key = torch.full((1, 1, 128, 16), near / 4, dtype=dtype)
    key[:, :, [3, 124]] = far / 4
    check_within_reach(key, slope, causal=causal)


@pytest.mark.parametrize("start", first_fast([2**45, 2**20, -(2**45)]))
@pytest.mark.parametrize("merged", [False, True])
def test_queries_far_from_all_keys_have_the_gradients_of_near_ones(merged, start):
    """To move all queries changes no weight, so positions of 2**45 cost no precision. Short rows share tiles."""
    query_length, key_length = (20, 20) if merged else (50, 40)
    leaves = [torch.randn(2, 2, length, 16, requires_grad=True) for length in (query_length, key_length, key_length)]
    leaves.append(torch.tensor([0.5, 0.1], requires_grad=True))
    weights = torch.randn(2, 2, query_length, 16)

    def gradients(start):
        out = alibi_attention(*leaves, query_start=torch.tensor([start, start]), causal=start > 0, backend="triton")
        return torch.autograd.grad(out, leaves, weights)

    near = gradients(key_length if start > 0 else -query_length)
    for got, expected in zip(gradients(start), near, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
