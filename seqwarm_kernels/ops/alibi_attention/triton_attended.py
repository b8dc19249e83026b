"""The keys that each block of queries attends, found before a kernel that loops over them.

One program for BLOCK_M queries. The keys next to them bound the sum of all weights from below, so all keys beyond the
reach can be left out (triton_reach.py).
"""

from __future__ import annotations

import triton.language as tl

from ..triton_launch import kernel
from .triton_reach import largest_norm, reach
from .triton_tiles import (
    ALIGNED,
    LOG2_E,
    TileSource,
    load_tile,
    offset_of,
    opposite,
    scores_of,
    slopes_of,
    split,
    store_range,
    visible_keys,
)


@kernel
def attended_keys_kernel(
    query,
    key,
    slopes,
    query_start,
    norms,  # not used if log2_tolerance is −∞
    ranges,
    counter,  # int32, set to 0
    query_offset: tl.int64,
    window: tl.int64,
    scale: tl.float32,
    log2_tolerance: tl.float32,  # −∞: no key is skipped
    segment_length: tl.int32,
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
    stride_slope_b: tl.int64,
    stride_slope_h: tl.int64,
    CAUSAL: tl.constexpr,
    LIMITED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    TILE: tl.constexpr,  # keys of a tile of the kernel that attends them
):
    num_blocks = tl.cdiv(query_length, BLOCK_M)
    program = tl.program_id(0)
    if program == 0:
        tl.store(counter, 0)
    block = program % num_blocks
    row = program // num_blocks
    head = row % num_heads
    batch = row // num_heads
    key_head = head // group_size

    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    query_offset = offset_of(index, query_length, query_start, query_offset, batch, None, stride_start)
    first, last, position, sequence = opposite(
        index, batch, None, None, 0, key_length, query_offset, segment_length, LIMITED, 0
    )
    low, high, center, _ = visible_keys(first, last, position, window, CAUSAL, LIMITED)
    high = tl.where(index < query_length, high, low)
    some = low < high
    begin, _, near_begin, near_end, _, end = split(low, high, center, BLOCK_N)
    if log2_tolerance > float("-inf"):
        slope2 = slopes_of(slopes, sequence, batch, head, stride_slope_b, stride_slope_h, some, False)[0]
        scale2 = scale * LOG2_E
        source = TileSource(query, batch, head, query_length, None, stride_qb, stride_qh, stride_qs)
        queries = load_tile(source, block * BLOCK_M, None, BLOCK_M, HEAD_DIM, BLOCK_D, ALIGNED)
        source = TileSource(key, batch, key_head, key_length, None, stride_kb, stride_kh, stride_ks)
        largest = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        for start in tl.range(near_begin, tl.minimum(near_end, end), BLOCK_N):
            keys = load_tile(source, start, None, BLOCK_N, HEAD_DIM, BLOCK_D, ALIGNED)
            columns = start + tl.arange(0, BLOCK_N)
            distance = tl.abs(center[:, None] - columns[None, :]).to(tl.float32)
            scores = scores_of(tl.dot(queries, tl.trans(keys)), scale2, slope2, distance, False)
            visible = (columns[None, :] >= low[:, None]) & (columns[None, :] < high[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            zero = tl.where(new_largest == float("-inf"), 0.0, new_largest)
            total = total * tl.exp2(largest - zero) + tl.sum(tl.exp2(scores - zero[:, None]), 1)
            largest = new_largest
        known = largest + tl.log2(total)
        query_norm = tl.sqrt(tl.sum(queries.to(tl.float32) * queries.to(tl.float32), 1))
        key_row = batch * (num_heads // group_size) + key_head
        key_norm = largest_norm(norms, key_row, begin, near_begin, key_length, NORM_BLOCK)
        distance = reach(query_norm, key_norm, scale2, slope2, known, log2_tolerance)
        first_reached = tl.min(tl.where(some, center - distance, near_begin), 0)
        begin = tl.minimum(tl.maximum(begin, first_reached), near_begin)
        if not CAUSAL:
            key_norm = largest_norm(norms, key_row, near_end, end, key_length, NORM_BLOCK)
            distance = reach(query_norm, key_norm, scale2, slope2, known, log2_tolerance)
            last_reached = tl.max(tl.where(some, center + distance, 0), 0)
            end = tl.minimum(end, tl.maximum(last_reached + 1, near_end))
    begin = begin // TILE * TILE
    if not CAUSAL:
        end = tl.minimum(tl.cdiv(end, TILE) * TILE, key_length)
    store_range(ranges, block, row, begin, end, query_length, BLOCK_M)
