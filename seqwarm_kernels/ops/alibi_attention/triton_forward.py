"""The forward kernel: one program for BLOCK_M queries of one head loops over the tiles of keys within their reach."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..triton_launch import kernel
from .triton_reach import largest_norm, reach
from .triton_tiles import (
    ALIGNED,
    LEFT,
    LN_2,
    LOG2_E,
    MASKED,
    RIGHT,
    Dropout,
    Keys,
    TileSource,
    farthest,
    is_linear,
    kept_keys,
    kept_weights,
    load_tile,
    moved_queries,
    offset_of,
    opposite,
    scores_of,
    seen_columns,
    slopes_of,
    split,
    store_range,
    store_tile,
    visible_keys,
    widen,
)


class Softmax(NamedTuple):
    """State of the online softmax over the keys attended so far."""

    total: Any  # sum of weights, relative to the largest score
    largest: Any  # largest score, in base 2, with bias −slope · distance to the center
    values: Any  # weighted sum of values


class Rows(NamedTuple):
    """A tile of queries, and the keys that each row sees."""

    query: Any
    index: Any
    low: Any
    high: Any
    center: Any
    slope2: Any
    begin: Any  # of the keys that any row sees
    end: Any


@triton.jit
def _attend(
    softmax,
    first,
    direction,
    count,
    reference,
    slope2,
    rows,
    keys,
    edge_value,
    dropout,
    scale2,
    SIDE: tl.constexpr,
    BOUNDED: tl.constexpr,  # `_is_bounded`, so the largest score so far serves all tiles
    PACKED: tl.constexpr,
    HIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACCESS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Attend `count` tiles, from column `first` to the right (direction 1) or to the left (-1).

    `first` does not depend on data in memory: otherwise the compiler forgets the alignment of addresses, and issues no
    asynchronous copies. In tiles that are not MASKED all rows share one slope, and the bias counts from the column
    `reference` instead of the row's center, which shifts all scores of a row equally."""
    total, largest, values = softmax
    shift = (SIDE * slope2) * (rows.center - reference).to(tl.float32)
    for tile in tl.range(0, count):
        start = first + direction * tile * BLOCK_N
        columns = start + tl.arange(0, BLOCK_N)
        kept = kept_keys(keys.mask, start, keys.key.length, keys.stride_mask, BLOCK_N)
        key = load_tile(keys.key, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ACCESS)
        products = tl.dot(rows.query, tl.trans(key), input_precision=PRECISION)
        if SIDE == MASKED:
            distance = tl.abs(rows.center[:, None] - columns[None, :]).to(tl.float32)
            scores = scores_of(products, scale2, rows.slope2, distance, PACKED)
            visible = (columns[None, :] >= rows.low[:, None]) & (columns[None, :] < rows.high[:, None])
            if kept is not None:
                visible = visible & kept[None, :]
            scores = tl.where(visible, scores, float("-inf"))
        else:
            bias = (SIDE * slope2) * (columns - reference).to(tl.float32)
            scores = products * scale2 + bias[None, :]
            if kept is not None:  # not by the bias: rows that see no key may hold NaN
                scores = tl.where(kept[None, :], scores, float("-inf"))
        if BOUNDED:
            new_largest = largest
            zero = largest + shift
        elif SIDE == MASKED:
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            zero = new_largest
        else:
            new_largest = tl.maximum(largest, tl.max(scores, 1) - shift)
            zero = new_largest + shift
        if not BOUNDED and (SIDE == MASKED or kept is not None):  # a row may not have seen a key yet
            zero = tl.where(new_largest == float("-inf"), 0.0, zero)
        weights = tl.exp2(scores - zero[:, None])
        if not BOUNDED:
            decay = tl.exp2(largest - new_largest)
            if SIDE == MASKED or kept is not None:
                decay = tl.where(new_largest == float("-inf"), 1.0, decay)
            largest = new_largest
            total = total * decay
            values = values * decay[:, None]
        total += tl.sum(weights, 1)
        if dropout.seed is not None:
            keep = kept_weights(dropout, rows.index, start, BLOCK_M, BLOCK_N)
            weights = tl.where(keep, weights, 0.0)
        if (PACKED or HIDES) and SIDE == MASKED:
            # Keys that no row sees may hold NaN. Clearing a tile in registers, as after a bulk copy, would make every
            # matrix product of the kernel wait for the one before.
            if HIDES:
                kept = seen_columns(rows, columns, kept, PACKED)
            else:
                kept = (columns >= tl.min(rows.low, 0)) & (columns < tl.max(rows.high, 0))
            value = load_tile(edge_value, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ALIGNED)
        else:
            value = load_tile(keys.value, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ACCESS)
        values = tl.dot(weights.to(value.dtype), value, values, input_precision=PRECISION)
    return Softmax(total, largest, values)


@triton.jit
def _is_bounded(query_norm, key_norm, scale2, slope2, largest, some, query):
    """Whether no weight of the remaining keys, relative to the largest score so far, can overflow.

    Their biases are at most 0, and their products at most ‖query‖ · `key_norm`. False for NaN."""
    MOST: tl.constexpr = 15.0 if query.dtype == tl.float16 else 30.0  # float16 ends at 2 ** 16; values may be large
    most = query_norm * key_norm * tl.abs(scale2) - largest
    exceeds = tl.where(some, tl.where(most <= MOST, 0, 1), 0)
    return (tl.max(exceeds, 0) == 0) & (slope2 >= 0)


@triton.jit
def _attend_outward(
    softmax, bounded, first, direction, count, reference, slope2, rows, keys, edge_value, dropout, scale2,
    BOUNDS: tl.constexpr, SIDE: tl.constexpr, PACKED: tl.constexpr, HIDES: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ACCESS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend tiles that every row sees. Of the two loops one has no tiles."""
    if BOUNDS:
        softmax = _attend(
            softmax, first, direction, tl.where(bounded, count, 0), reference, slope2, rows, keys, edge_value, dropout,
            scale2, SIDE, True, PACKED, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
        )  # fmt: skip
        count = tl.where(bounded, 0, count)
    return _attend(
        softmax, first, direction, count, reference, slope2, rows, keys, edge_value, dropout, scale2,
        SIDE, False, PACKED, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
    )  # fmt: skip


@kernel
def forward_kernel(
    query,
    key,
    value,
    edge_value,  # value, by pointers, if there are packed sequences or HIDES, else None
    slopes,
    query_start,
    key_padding_mask,
    dropout_seed,
    cu_seqlens_q,
    cu_seqlens_k,
    norms,  # not used if log2_tolerance is −∞
    out,
    lse,
    log2_sum,
    ranges,
    query_offset: tl.int64,
    window: tl.int64,
    scale: tl.float32,
    log2_tolerance: tl.float32,  # −∞: no key is skipped
    inverse_keep: tl.float32,
    dropout_threshold: tl.uint32,
    segment_length: tl.int32,
    num_heads: tl.int32,
    group_size: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    num_sequences: tl.int32,
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
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_os: tl.int64,
    stride_mb: tl.int64,
    stride_ms: tl.int64,
    stride_slope_b: tl.int64,
    stride_slope_h: tl.int64,
    SEARCH_STEPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    LIMITED: tl.constexpr,  # a window, segments or packed sequences limit the keys of a query
    HEAD_OFFSETS: tl.constexpr,  # dropout_seed is (batch, heads, 4)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACCESS: tl.constexpr,
    PRECISION: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    HIDES: tl.constexpr,  # no query may see some keys, which may hold NaN
    BOUNDS: tl.constexpr,  # tiles whose scores norms bound have a loop of their own, which finds no maximum
):
    num_blocks = tl.cdiv(query_length, BLOCK_M)
    program = tl.program_id(0)
    # Longest first: late queries see most keys, and the last heads have the flattest slopes.
    block = num_blocks - 1 - program % num_blocks
    head = num_heads - 1 - program // num_blocks % num_heads
    batch = program // num_blocks // num_heads
    key_head = head // group_size
    row = batch * num_heads + head
    PACKED: tl.constexpr = cu_seqlens_q is not None

    index = block * BLOCK_M + tl.arange(0, BLOCK_M)
    row_start = None if PACKED else query_start
    query_offset = offset_of(index, query_length, row_start, query_offset, batch, None, stride_start)
    first, last, position, sequence = opposite(
        index, batch, cu_seqlens_q, cu_seqlens_k, num_sequences, key_length, query_offset, segment_length, LIMITED,
        SEARCH_STEPS,
    )  # fmt: skip
    if PACKED and query_start is not None:
        moved, _ = moved_queries(sequence, query_start, cu_seqlens_q, cu_seqlens_k, num_sequences, stride_start)
        position += moved
    low, high, center, beyond = visible_keys(first, last, position, window, CAUSAL, LIMITED)
    high = tl.where(index < query_length, high, low)
    sees_some = low < high
    slope2, slope2_full = slopes_of(slopes, sequence, batch, head, stride_slope_b, stride_slope_h, sees_some, PACKED)
    begin, full_begin, near_begin, near_end, full_end, end = split(low, high, center, BLOCK_N)
    seen_begin, seen_end = begin, end
    distance = farthest(sees_some, center, full_begin, full_end)
    linear = is_linear(slope2_full, distance, key_padding_mask is not None)
    full_begin, near_begin, near_end, full_end = widen(
        linear, begin, full_begin, near_begin, near_end, full_end, end, BLOCK_N
    )
    scale2 = scale * LOG2_E

    source = TileSource(query, batch, head, query_length, None, stride_qb, stride_qh, stride_qs)
    tile = load_tile(source, block * BLOCK_M, None, BLOCK_M, HEAD_DIM, BLOCK_D, ACCESS)
    rows = Rows(tile, index, low, high, center, slope2, seen_begin, seen_end)
    query_norm = tl.sqrt(tl.sum(tile.to(tl.float32) * tile.to(tl.float32), 1))
    key_row = batch * (num_heads // group_size) + key_head
    skips = log2_tolerance > float("-inf")
    key_norm = largest_norm(norms, key_row, begin, tl.where(skips, near_begin, begin), key_length, NORM_BLOCK)
    if key_padding_mask is not None:
        key_padding_mask += batch * stride_mb
    keys = Keys(
        TileSource(key, batch, key_head, key_length, None, stride_kb, stride_kh, stride_ks),
        TileSource(value, batch, key_head, key_length, None, stride_vb, stride_vh, stride_vs),
        key_padding_mask,
        stride_ms,
    )
    if edge_value is not None:
        edge_value = TileSource(edge_value, batch, key_head, key_length, None, stride_vb, stride_vh, stride_vs)
    seed = None if dropout_seed is None else tl.load(dropout_seed)
    head_offsets = dropout_seed if HEAD_OFFSETS else None
    dropout = Dropout(seed, head_offsets, row, dropout_threshold, inverse_keep, None, num_heads, query_length)

    softmax = Softmax(
        tl.zeros((BLOCK_M,), tl.float32),
        tl.full((BLOCK_M,), float("-inf"), tl.float32),
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
    )
    count = tl.cdiv(tl.minimum(near_end, end) - near_begin, BLOCK_N)
    softmax = _attend(
        softmax, near_begin, 1, count, near_begin, slope2_full, rows, keys, edge_value, dropout,
        scale2, MASKED, False, PACKED, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
    )  # fmt: skip
    known = softmax.largest + tl.log2(softmax.total)
    distance = reach(query_norm, key_norm, scale2, slope2, known, log2_tolerance)
    first_reached = tl.min(tl.where(sees_some, center - distance, near_begin), 0)
    begin = tl.minimum(tl.maximum(begin, first_reached), near_begin)
    bounded = skips & _is_bounded(query_norm, key_norm, scale2, slope2_full, softmax.largest, sees_some, tile)
    bounded_right = bounded
    if not CAUSAL:
        key_norm = largest_norm(norms, key_row, near_end, tl.where(skips, end, near_end), key_length, NORM_BLOCK)
        distance = reach(query_norm, key_norm, scale2, slope2, known, log2_tolerance)
        bounded_right = _is_bounded(query_norm, key_norm, scale2, slope2_full, softmax.largest, sees_some, tile)
        bounded_right = skips & bounded_right
        last_reached = tl.max(tl.where(sees_some, center + distance, 0), 0)
        end = tl.minimum(end, tl.maximum(last_reached + 1, near_end))
    begin = begin // BLOCK_N * BLOCK_N

    # All tiles that every row sees are left of near_begin or right of near_end, so loops run outward from there.
    count = (near_begin - tl.maximum(begin, full_begin)) // BLOCK_N
    softmax = _attend_outward(
        softmax, bounded, near_begin - BLOCK_N, -1, count, near_begin, slope2_full, rows, keys, edge_value, dropout,
        scale2, BOUNDS, LEFT, PACKED, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
    )  # fmt: skip
    if not CAUSAL:
        count = tl.cdiv(tl.minimum(full_end, end) - near_end, BLOCK_N)
        softmax = _attend_outward(
            softmax, bounded_right, near_end, 1, count, near_begin, slope2_full, rows, keys, edge_value, dropout,
            scale2, BOUNDS, RIGHT, PACKED, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
        )  # fmt: skip
    for edge in range(0 if LIMITED else 1, 1 if CAUSAL else 2):  # at both ends some rows do not see every key
        first_tile, direction, count = full_begin - BLOCK_N, -1, (full_begin - begin) // BLOCK_N
        if edge == 1:
            first_tile, direction, count = full_end, 1, tl.cdiv(end - full_end, BLOCK_N)
        softmax = _attend(
            softmax, first_tile, direction, count, near_begin, slope2_full, rows, keys, edge_value, dropout, scale2,
            MASKED, False, PACKED, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
        )  # fmt: skip
    if not CAUSAL:
        end = tl.minimum(tl.cdiv(end, BLOCK_N) * BLOCK_N, key_length)

    total, largest, values = softmax
    total = tl.where(sees_some, total, 0.0)
    empty = total == 0  # False for NaN, which must reach the output
    attended = tl.where(empty[:, None], 0.0, values * (inverse_keep / tl.where(empty, 1.0, total))[:, None])
    store_tile(
        out, attended, batch, head, block * BLOCK_M, query_length, None, stride_ob, stride_oh, stride_os,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    row_log2 = tl.where(empty, float("-inf"), largest + tl.log2(total))
    row_offset = row.to(tl.int64) * query_length + index
    tl.store(log2_sum + row_offset, row_log2, mask=index < query_length)
    row_lse = tl.where(empty, float("-inf"), (row_log2 - slope2 * beyond) * LN_2)
    tl.store(lse + row_offset, row_lse, mask=index < query_length)
    store_range(ranges, block, row, begin, end, query_length, BLOCK_M)
