"""The keys that native attention visits. Results do not show them: what is out of reach changes less than rounding."""

import math

import pytest
import torch

from seqwarm_kernels.ops import backends

pytestmark = pytest.mark.skipif(backends.problem("native") is not None, reason=str(backends.problem("native")))

#: Of csrc/alibi_attention/cpu/problem.h: queries of a tile, keys that share a norm, the step of ranges of keys, and
#: queries that share a range.
TILE, NORM_BLOCK, STEP, RANGE_BLOCK = 64, 128, 32, 32


def up(number, step):
    return -(-number // step) * step


@pytest.mark.parametrize("causal", [True, False])
def test_ranges_are_those_of_the_proof(causal):
    """With the margins that docs/kernels/skipping.md derives, in float64. Ranges hide rounding: they end at steps."""
    length, heads, tolerance, scale = 700, 24, 2**-20, 0.4
    query, key, value = torch.randn(1, heads, length, 32), torch.randn(1, 1, length, 32), torch.randn(1, 1, length, 32)
    key *= torch.linspace(0.2, 3, length)[:, None]  # norms differ from block to block
    slopes = torch.logspace(-3.5, 0.5, heads, base=10)
    options = (None, None, None, 0, causal, scale, None, None, 0.0, tolerance, None)
    *_, ranges = torch.ops.seqwarm.alibi_attention.native(query, key, value, slopes, *options)

    log2_e = math.log2(math.e)
    scores = query[0].double() @ key[0, 0].double().T * scale * log2_e
    query_norms = query[0].double().norm(dim=-1) * scale * log2_e
    key_norms = key[0, 0].double().norm(dim=-1)
    log2_tolerance = math.log2(tolerance if causal else tolerance / 2)
    wanted = [
        expected
        for head, slope in enumerate((slopes.double() * log2_e).tolist())
        for start in range(0, length, TILE)
        for expected in ranges_of_tile(
            start, slope, scores[head], query_norms[head], key_norms, log2_tolerance, causal=causal
        )
    ]
    assert ranges.reshape(-1, 2).tolist() == wanted


def ranges_of_tile(start, slope, scores, query_norms, key_norms, log2_tolerance, *, causal):
    """The range of each RANGE_BLOCK of queries. `slope`, `scores` (queries, keys) and `query_norms` are in base 2."""
    length = len(key_norms)
    queries = torch.arange(start, min(start + TILE, length))
    distances = queries[:, None] - torch.arange(length)
    biased = (scores[queries] - slope * distances.abs()).masked_fill(causal & (distances < 0), -math.inf)
    begin, end = start, up(queries[-1].item() + 1, STEP)  # visited first
    last = end if causal else up(length, STEP)
    if slope * TILE < TILE:  # flat: more keys give a better bound of the sum
        begin, end = max(0, begin - TILE), min(last, end + TILE)
    known = torch.log2(torch.exp2(biased[:, begin:end]).sum(1))
    rest = 2**-4 - known - math.log2(-math.expm1(-slope * math.log(2))) - log2_tolerance

    def reach(keys):
        """Beyond which keys of norms up to the largest of `keys`, in whole blocks, need no visit."""
        most = query_norms[queries] * keys.max() * (1 + 2**-9) if len(keys) else 0
        return ((most + rest) / slope).ceil().clamp(min=0).long()

    low = queries - reach(key_norms[: up(begin, NORM_BLOCK)])
    high = queries + reach(key_norms[end // NORM_BLOCK * NORM_BLOCK :]) + 1
    for first in range(0, len(queries), RANGE_BLOCK):
        block = slice(first, first + RANGE_BLOCK)
        lowest = max(0, min(begin, low[block].min().item() // STEP * STEP)) if begin > 0 else 0
        highest = min(last, max(end, up(high[block].max().item(), STEP))) if end < last else last
        yield [lowest, min(highest, length)]
