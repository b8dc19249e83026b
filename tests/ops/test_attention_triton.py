"""Triton's attention kernels with small tiles: short rows of few heads reach every loop, in a second each."""

from types import SimpleNamespace

import pytest
import torch

from seqwarm_kernels import alibi_attention
from tests.support.attention_cases import PACKED_CASES, a_third_of, check_case
from tests.support.backends import needs_interpreter
from tests.support.kernels import check_extreme_slopes
from tests.support.skipping import NEAR_AND_FAR_KEYS, check_within_reach
from tests.support.tiers import first_fast

pytestmark = [needs_interpreter(), pytest.mark.usefixtures("poisoned_memory", "small_tiles")]


@pytest.fixture
def small_tiles(monkeypatch):
    from seqwarm_kernels.ops.alibi_attention import triton as host
    from seqwarm_kernels.ops.alibi_attention.triton_configurations import Configuration, Tiles

    tiles = Configuration(Tiles(32, 16, 4, 2), Tiles(32, 16, 4, 2), Tiles(16, 32, 4, 2))
    monkeypatch.setattr(host, "configuration", lambda *_, **__: tiles)
    monkeypatch.setattr(host, "_known", type(host._known)())


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


#: Of the grid.
ROWS = [
    *(
        "causal",
        "full",
        "everything",
        "mask",
        "window",
        "window, full",
        "segments of 70",
        "dropout",
        "starts in a tensor",
    ),
    *("more queries than keys", "far more queries than keys, full", "head_dim 5", "huge slopes", "strided dims"),
]
PACKED = ["rows without keys in a tile", "starts", "unused tokens, window", "dropout", "far fewer keys"]


@pytest.mark.parametrize("name", first_fast(ROWS))
def test_rows(name):
    check_case(a_third_of(name), "triton")


@pytest.mark.parametrize("name", first_fast(PACKED))
def test_packed_sequences(name):
    check_case(PACKED_CASES[name], "triton", stretch=1 / 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "full"])
def test_bulk_copies(name):
    """The interpreter loads tiles of float16 as GPUs with bulk copies do."""
    check_case(a_third_of(name), "triton", dtype=torch.float16)


@pytest.mark.slow
def test_bulk_copies_of_packed_sequences():
    check_case(PACKED_CASES["starts"], "triton", dtype=torch.float16, stretch=1 / 3)


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


@pytest.mark.parametrize("causal", first_fast([True, False]))
@pytest.mark.parametrize("keys", NEAR_AND_FAR_KEYS)
def test_keys_in_reach(skipping_of_few_keys, keys, causal):
    check_within_reach("triton", keys, causal=causal)


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
