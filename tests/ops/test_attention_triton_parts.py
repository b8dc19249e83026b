"""Parts of Triton's attention that decide which keys and queries are visited: results alone do not show them."""

import math

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from seqwarm_kernels.ops.alibi_attention.schema import RANGE_BLOCK  # noqa: E402
from seqwarm_kernels.ops.alibi_attention.triton_backward_ranges import backward_ranges_kernel  # noqa: E402
from seqwarm_kernels.ops.alibi_attention.triton_reach import reach  # noqa: E402
from seqwarm_kernels.ops.alibi_attention.triton_tiles import FAR  # noqa: E402
from tests.support.kernels import DEVICES, TRITON_RUNS  # noqa: E402

pytestmark = [TRITON_RUNS, pytest.mark.parametrize("device", DEVICES)]


@pytest.mark.parametrize(("query_length", "key_length"), [(500, 300), (RANGE_BLOCK, 17), (4 * RANGE_BLOCK, 64)])
def test_queries_that_attended_each_tile_of_keys(device, query_length, key_length):
    rows, block_n, chunk = 2, 16, 8
    num_ranges, num_tiles = -(-query_length // RANGE_BLOCK), -(-key_length // block_n)
    ranges = torch.randint(key_length + 1, (rows, num_ranges, 2), dtype=torch.int32).sort(-1).values
    ranges[1, -1] = torch.tensor([block_n - 1, block_n])  # the last key of a tile, and no key of the next one
    found = torch.full((rows * num_tiles + 1, 2), -7, dtype=torch.int32, device=device)
    grid = (rows * -(-num_tiles // 2),)
    backward_ranges_kernel[grid](
        ranges.to(device), found, None, query_length, key_length, BLOCK_N=block_n, TILES=2, CHUNK=chunk, num_warps=4
    )
    wanted = []
    for row in ranges.tolist():
        for tile in range(0, key_length, block_n):
            end = min(tile + block_n, key_length)
            hit = [block for block, (first, last) in enumerate(row) if first < end and last > tile]
            wanted.append([hit[0] * RANGE_BLOCK, (hit[-1] + 1) * RANGE_BLOCK] if hit else [FAR.value, 0])
    assert found[:-1].tolist() == wanted
    assert found[-1].tolist() == [-7, -7]


@triton.jit
def _reach_kernel(values, found, COUNT: tl.constexpr):
    """values: (5, COUNT) float32: norms of the query and the keys, slope, log2 of the sum, log2 of the tolerance"""
    index = tl.arange(0, COUNT)
    query_norm, key_norm = tl.load(values + index), tl.load(values + COUNT + index)
    slope2, sum2 = tl.load(values + 2 * COUNT + index), tl.load(values + 3 * COUNT + index)
    tolerance = tl.load(values + 4 * COUNT + index)
    tl.store(found + index, reach(query_norm, key_norm, -0.5, slope2, sum2, tolerance))


def test_reach_is_that_of_the_proof(device):
    """With the margins that docs/kernels/skipping.md derives."""
    count = 64
    slopes = torch.logspace(-15.5, 3, count, base=2)
    values = torch.stack(
        [10 * torch.rand(count), 30 * torch.rand(count), slopes, 20 * torch.rand(count), -24 * torch.rand(count)]
    )
    values[:, 0] = torch.tensor([1.0, 1.0, 1e-6, 0.0, -24.0])  # too flat
    values[:, 1] = torch.tensor([1.0, 1.0, 2.0**-16, 0.0, -24.0])  # the flattest that is too flat
    values[:, 2] = torch.tensor([1.0, math.inf, 1.0, 0.0, -24.0])  # a key with infinity or NaN
    values[:, 3] = torch.tensor([1.0, 1.0, 1.0, -math.inf, -24.0])  # no key so far
    values[:, 4] = torch.tensor([1.0, 1.0, 1.0, 100.0, -24.0])  # no other key matters
    found = torch.full((count,), -7, dtype=torch.int32, device=device)
    _reach_kernel[(1,)](values.to(device), found, COUNT=count)
    assert found[:4].tolist() == [FAR.value] * 4
    assert found[4] == 0
    query_norm, key_norm, slope, sum2, tolerance = values[:, 5:].double()
    most = query_norm * key_norm * 0.5 * (1 + 2**-9) + 2**-4
    exact = ((most - sum2 - torch.log2(-torch.expm1(-slope * math.log(2))) - tolerance) / slope).clamp(min=0)
    rounding = 1e-5 * exact + 2**-4.9 / slope  # 1 − 2^(−m) is a difference of close numbers
    rounding = torch.where(slope < 2**-8, rounding, 1e-5 * exact + 1e-4)
    distance = found[5:].double().cpu()
    assert (distance >= exact - rounding).all()
    assert (distance <= exact + 1 + rounding).all()
