"""The keys that native attention visits. Results do not show them: what is out of reach changes less than rounding."""

import math

import pytest
import torch

from tests.support.backends import needs_native

pytestmark = needs_native

#: Of csrc/alibi_attention/cpu/problem.h: queries of a tile, keys that share a norm, the step of ranges of keys, and
#: queries that share a range.
TILE, NORM_BLOCK, STEP, RANGE_BLOCK = 64, 128, 32, 32


def up(number, step):
    return -(-number // step) * step


def ranges_of(query, key, slopes, *, causal=True, scale=0.4, window=None, segment_length=None, tolerance=2**-20):
    options = (None, None, None, 0, causal, scale, segment_length, window, 0.0, tolerance, None)
    *_, ranges = torch.ops.seqwarm.alibi_attention.native(query, key, key, slopes, *options)
    return ranges.reshape(-1, 2).tolist()


def random_inputs(length, heads):
    query, key = torch.randn(1, heads, length, 32), torch.randn(1, 1, length, 32)
    return query, key * torch.linspace(0.2, 3, length)[:, None]  # norms differ from block to block


def keys_that_outweigh_others(length, heads):
    """In the second block of keys. The next ones are farther away than the reach of some queries, which is 0."""
    key = torch.full((1, 1, length, 32), 0.01)
    key[:, :, NORM_BLOCK : 2 * NORM_BLOCK] = 2
    return torch.ones(1, heads, length, 32), key


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("inputs", "length"), [(random_inputs, 641), (keys_that_outweigh_others, 400)])
def test_ranges_are_those_of_the_proof(inputs, length, causal):
    """With the margins that docs/kernels/skipping.md derives, in float64. Ranges hide rounding: they end at steps."""
    log2_e = math.log2(math.e)
    tolerance, scale = 2**-20, 0.4
    slopes = torch.cat([torch.logspace(-3.5, 0.5, 23, base=10), torch.tensor([1.008 / log2_e])])  # a flat one ends at 1
    heads = len(slopes)
    query, key = inputs(length, heads)
    ranges = ranges_of(query, key, slopes, causal=causal, scale=scale, tolerance=tolerance)

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
    assert ranges == wanted


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


@pytest.mark.parametrize("slope", [0.0, -0.0])
def test_without_a_slope_all_keys_are_in_reach(slope):
    query, key = random_inputs(300, 1)
    assert ranges_of(query, key, torch.tensor([slope]), causal=False) == [[0, 300]] * 10


@pytest.mark.parametrize(("limit", "narrow", "wide"), [("window", 63, 64), ("segment_length", 127, 128)])
def test_few_visible_keys_are_not_worth_a_search(limit, narrow, wide):
    """127 in place of 128."""
    query, key = random_inputs(600, 1)

    def searches(number):
        found, without = (
            ranges_of(query, key, torch.ones(1), causal=False, tolerance=tolerance, **{limit: number})
            for tolerance in (2**-8, 0.0)
        )
        return found != without

    assert (searches(narrow), searches(wide)) == (False, True)


@pytest.mark.parametrize(("length", "searches"), [(127, False), (128, True)])
def test_short_packed_sequences_are_not_worth_a_search(length, searches):
    query, key = (tensor[0].transpose(0, 1) for tensor in random_inputs(4 * length, 1))
    cu_seqlens = torch.arange(0, 4 * length + 1, length, dtype=torch.int32)

    def ranges(tolerance):
        bound = 4 * length  # max_seqlen may be larger than every length
        options = (cu_seqlens, cu_seqlens, None, bound, bound, False, 0.4, None, 0.0, tolerance)
        return torch.ops.seqwarm.alibi_attention_varlen.native(query, key, key, torch.ones(1), *options)[3].tolist()

    assert (ranges(2**-8) != ranges(0.0)) is searches
