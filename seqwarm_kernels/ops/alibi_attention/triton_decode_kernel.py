"""The kernels of decoding: few queries over many keys, split over chunks of keys, and the merging of their results.

A program of `decode_kernel` has the queries of all heads that share a key head as the rows of its tiles, so a key is
read once for all of them. It returns early if no key of its chunk is in reach.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_launch import kernel
from .triton_reach import reach
from .triton_tiles import (
    ALIGNED,
    FAR,
    LN_2,
    LOG2_E,
    Dropout,
    TileSource,
    in_base_2,
    kept_keys,
    kept_weights,
    load_tile,
    scores_of,
    visible_keys,
)

#: Ranges start and end at multiples of this, which the tiles of backward divide.
_RANGE_STEP = tl.constexpr(128)


@triton.jit
def _scores(query, source, start, kept, low, high, center, slope2, scale2, BLOCK_N: tl.constexpr,
            HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Scores in base 2 of a tile of keys, −∞ where a row does not see a key."""
    columns = start + tl.arange(0, BLOCK_N)
    key = load_tile(source, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ALIGNED)
    distance = tl.abs(center[:, None] - columns[None, :]).to(tl.float32)
    scores = scores_of(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale2, slope2, distance, True)
    visible = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
    if kept is not None:
        visible = visible & kept[None, :]
    return tl.where(visible, scores, float("-inf"))


@kernel
def decode_kernel(
    query,
    key,
    value,
    slopes,
    query_start,
    key_padding_mask,
    dropout_seed,
    key_norm_bound,  # (batch, key heads)
    partial_out,  # (rows, chunks, BLOCK_D) float32: weighted sums of values; rows are (batch, head, query)
    partial_sums,  # (rows, chunks, 2) float32: largest score, sum of weights relative to it
    ranges,
    query_offset: tl.int64,
    window: tl.int64,
    scale: tl.float32,
    log2_tolerance: tl.float32,  # half of the tolerance, for each side; −∞: nothing is skipped
    log2_keys: tl.float32,  # of the largest number of keys that a query sees
    dropout_threshold: tl.uint32,
    num_heads: tl.int32,
    group_size: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    stride_start: tl.int64,
    stride_qb: tl.int64,
    stride_qh: tl.int64,
    stride_qs: tl.int64,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_vb: tl.int64,
    stride_vh: tl.int64,
    stride_vs: tl.int64,
    stride_mb: tl.int64,
    stride_ms: tl.int64,
    stride_slope_b: tl.int64,
    stride_slope_h: tl.int64,
    CAUSAL: tl.constexpr,
    LIMITED: tl.constexpr,
    HEAD_OFFSETS: tl.constexpr,  # dropout_seed is (batch, heads, 4)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_chunks = tl.cdiv(key_length, CHUNK)
    num_key_heads = num_heads // group_size
    heads_at_once = BLOCK_M // query_length
    num_parts = tl.cdiv(group_size, heads_at_once)
    program = tl.program_id(0)
    chunk = program % num_chunks
    part = program // num_chunks % num_parts
    key_head = program // num_chunks // num_parts % num_key_heads
    batch = program // num_chunks // num_parts // num_key_heads

    # Rows: all queries of as many heads as fit into a tile.
    place = tl.arange(0, BLOCK_M)
    in_group = part * heads_at_once + place // query_length
    token = place % query_length
    exists = (in_group < group_size) & (place < heads_at_once * query_length)
    head = key_head * group_size + tl.where(exists, in_group, 0)
    row = (batch * num_heads + head) * query_length + token
    if query_start is not None:
        query_offset += tl.load(query_start + batch * stride_start)
    position = token.to(tl.int64) + query_offset
    low, high, center, _ = visible_keys(token * 0, key_length, position, window, CAUSAL, LIMITED)
    high = tl.where(exists, high, low)
    sees_some = low < high
    slope2 = in_base_2(tl.load(slopes + batch * stride_slope_b + head * stride_slope_h))
    scale2 = scale * LOG2_E

    columns = tl.arange(0, BLOCK_D)
    pointers = (
        query + batch.to(tl.int64) * stride_qb + (head * stride_qh + token * stride_qs)[:, None] + columns[None, :]
    )
    tile = tl.load(pointers, mask=exists[:, None] & (columns < HEAD_DIM)[None, :], other=0.0)
    if key_padding_mask is not None:
        key_padding_mask += batch * stride_mb
    keys = TileSource(key, batch, key_head, key_length, None, stride_kb, stride_kh, stride_ks)
    values = TileSource(value, batch, key_head, key_length, None, stride_vb, stride_vh, stride_vs)

    # The tile of keys next to the queries bounds all sums of weights from below.
    skips = log2_tolerance > float("-inf")
    known = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    if skips:
        nearest = tl.maximum(tl.minimum(center, high - 1), low)
        near = tl.maximum(tl.max(nearest, 0) + 1 - BLOCK_N, 0)
        kept = kept_keys(key_padding_mask, near, key_length, stride_ms, BLOCK_N)
        scores = _scores(
            tile, keys, near, kept, low, high, center, slope2, scale2, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION
        )
        largest = tl.max(scores, 1)
        zero = tl.where(largest == float("-inf"), 0.0, largest)
        known = largest + tl.log2(tl.sum(tl.exp2(scores - zero[:, None]), 1))
        if key_norm_bound is not None:
            bound = tl.load(key_norm_bound + batch * num_key_heads + key_head)
            norm = tl.sqrt(tl.sum(tile.to(tl.float32) * tile.to(tl.float32), 1))
            distance = reach(norm, bound, scale2, slope2, known, log2_tolerance)
            # Queries of one head share a range, since backward reads one. The tile next to the queries stays.
            same_head = head[:, None] == head[None, :]
            left = tl.where(sees_some, tl.minimum(center - distance, near), FAR)
            right = tl.where(sees_some, tl.maximum(center + distance + 1, near + BLOCK_N), 0)
            left = tl.min(tl.where(same_head, left[None, :], FAR), 1)
            right = tl.max(tl.where(same_head, right[None, :], 0), 1)
            low = tl.maximum(low, tl.maximum(left, 0) // _RANGE_STEP * _RANGE_STEP)
            high = tl.minimum(high, tl.cdiv(right, _RANGE_STEP) * _RANGE_STEP)
    if chunk == 0:
        of_head = ranges + (batch * num_heads + head) * 2
        same_head = head[:, None] == head[None, :]
        begin = tl.min(tl.where(same_head & sees_some[None, :], low[None, :], FAR), 1)
        end = tl.max(tl.where(same_head & sees_some[None, :], high[None, :], 0), 1)
        begin = tl.minimum(begin, end) // _RANGE_STEP * _RANGE_STEP
        end = tl.minimum(tl.cdiv(end, _RANGE_STEP) * _RANGE_STEP, key_length)
        tl.store(of_head, begin, mask=exists & (token == 0))
        tl.store(of_head + 1, end, mask=exists & (token == 0))

    begin = tl.maximum(tl.min(tl.where(sees_some, low, FAR), 0), chunk * CHUNK)
    end = tl.minimum(tl.max(high, 0), (chunk + 1) * CHUNK)
    largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    seed = None if dropout_seed is None else tl.load(dropout_seed)
    head_offsets = dropout_seed if HEAD_OFFSETS else None
    for step in tl.range((begin - chunk * CHUNK) // BLOCK_N, tl.cdiv(end - chunk * CHUNK, BLOCK_N)):
        start = chunk * CHUNK + step * BLOCK_N
        kept = kept_keys(key_padding_mask, start, key_length, stride_ms, BLOCK_N)
        scores = _scores(
            tile, keys, start, kept, low, high, center, slope2, scale2, BLOCK_N, HEAD_DIM, BLOCK_D, PRECISION
        )
        largest_here = tl.max(scores, 1)
        new_largest = tl.maximum(largest, largest_here)
        zero = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp2(scores - zero[:, None])
        decay = tl.where(new_largest == float("-inf"), 1.0, tl.exp2(largest - new_largest))
        largest = new_largest
        total = total * decay + tl.sum(weights, 1)
        out = out * decay[:, None]
        if dropout_seed is not None:
            dropout = Dropout(
                seed, head_offsets, batch * num_heads + head, dropout_threshold, 1.0, None, num_heads, query_length
            )
            weights = tl.where(kept_weights(dropout, token, start, BLOCK_M, BLOCK_N), weights, 0.0)
        # All keys with scores up to `least` weigh at most half of the tolerance together. NaN compares false.
        least = known + log2_tolerance - log2_keys - 2**-4
        if tl.max(tl.where(largest_here <= least, 0, 1), 0) > 0:
            seen = (start + tl.arange(0, BLOCK_N) >= begin) & (start + tl.arange(0, BLOCK_N) < end)
            seen = seen if kept is None else seen & kept
            tile_of_values = load_tile(values, start, seen, BLOCK_N, HEAD_DIM, BLOCK_D, ALIGNED)
            out = tl.dot(weights.to(tile_of_values.dtype), tile_of_values, out, input_precision=PRECISION)
    result = row.to(tl.int64) * num_chunks + chunk
    tl.store(partial_sums + 2 * result, largest, mask=exists)
    tl.store(partial_sums + 2 * result + 1, total, mask=exists)
    matters = exists & (total != 0)  # True for NaN
    tl.store(partial_out + result[:, None] * BLOCK_D + columns[None, :], out, mask=matters[:, None])


@kernel
def merge_kernel(
    partial_out,
    partial_sums,
    slopes,
    query_start,
    out,
    lse,
    log2_sum,
    query_offset: tl.int64,
    window: tl.int64,
    inverse_keep: tl.float32,
    num_heads: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    num_chunks: tl.int32,
    stride_start: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_os: tl.int64,
    stride_slope_b: tl.int64,
    stride_slope_h: tl.int64,
    CAUSAL: tl.constexpr,
    LIMITED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0)
    token = row % query_length
    head = row // query_length % num_heads
    batch = row // query_length // num_heads
    columns = tl.arange(0, BLOCK_D)
    largest = float("-inf")
    total = 0.0
    sums = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        inside = chunks < num_chunks
        results = row.to(tl.int64) * num_chunks + chunks
        own = tl.load(partial_sums + 2 * results, mask=inside, other=float("-inf"))
        weight = tl.load(partial_sums + 2 * results + 1, mask=inside, other=0.0)
        matters = weight != 0  # True for NaN, which must reach the output
        new_largest = tl.maximum(largest, tl.max(own, 0))
        factor = tl.where(own == new_largest, 1.0, tl.exp2(own - new_largest))
        decay = tl.where(largest == new_largest, 1.0, tl.exp2(largest - new_largest))
        total = total * decay + tl.sum(weight * factor, 0)
        pointers = partial_out + results[:, None] * BLOCK_D + columns[None, :]
        parts = tl.load(pointers, mask=matters[:, None], other=0.0)
        sums = sums * decay + tl.sum(factor[:, None] * parts, 0)
        largest = new_largest
    if query_start is not None:
        query_offset += tl.load(query_start + batch * stride_start)
    position = token.to(tl.int64) + query_offset
    _, _, _, beyond = visible_keys(token * 0, key_length, position, window, CAUSAL, LIMITED)
    slope2 = in_base_2(tl.load(slopes + batch * stride_slope_b + head * stride_slope_h))
    empty = total == 0
    sums = tl.where(empty, 0.0, sums * (inverse_keep / tl.where(empty, 1.0, total)))
    pointers = out + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh + token * stride_os + columns
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=columns < HEAD_DIM)
    row_log2 = largest + tl.log2(total)
    tl.store(log2_sum + row, row_log2)
    tl.store(lse + row, tl.where(empty, float("-inf"), (row_log2 - slope2 * beyond) * LN_2))
