"""Backward, third kernel: one program for BLOCK_N keys computes the gradients of keys and values over the queries that
attended them. triton_backward_query.py has the formulas. Tiles are transposed here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..triton_launch import kernel
from .triton_tiles import (
    BULK,
    FAR,
    LEFT,
    LOG2_E,
    MASKED,
    RIGHT,
    Dropout,
    TileSource,
    far_of,
    farthest,
    is_linear,
    kept_keys,
    kept_weights,
    load_tile,
    moved_queries,
    offset_of,
    opposite,
    scores_of,
    slopes_of,
    split,
    store_tile,
    turned,
    turns_of,
    visible_queries,
)


class KeyRows(NamedTuple):
    """A tile of keys, and the queries that see each row."""

    key: Any
    value: Any
    low: Any
    high: Any
    center: Any
    slope2: Any
    begin: Any
    first_turn: Any  # of each key, or one number if not LIMITED
    last_turn: Any


class Queries(NamedTuple):
    query: Any
    grad_out: Any
    lse2: Any  # distances count from the nearest key; +∞ where a query saw no key
    delta: Any


@triton.jit
def _over_queries(
    grad_key,
    grad_value,
    begin,
    end,
    reference,
    slope2,
    first_turn,
    last_turn,
    rows,
    queries,
    dropout,
    scale2,
    SIDE: tl.constexpr,
    CAUSAL: tl.constexpr,
    PACKED: tl.constexpr,
    MEETS: tl.constexpr,
    LIMITED: tl.constexpr,
    BLIND: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACCESS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    own = (-SIDE * slope2) * (rows.center - reference).to(tl.float32)
    # Here addresses are cheaper to compute again than to keep in registers across the loop. At 32 that would spill.
    RECOMPUTES: tl.constexpr = ACCESS == BULK and (BLOCK_D == 64 or BLOCK_D == 128)
    for start in tl.range(begin, end, BLOCK_M, num_stages=2 if SIDE == MASKED else None, disable_licm=RECOMPUTES):
        columns = start + tl.arange(0, BLOCK_M)
        inside = columns < queries.query.length
        kept = None
        if BLIND and SIDE == MASKED:
            kept = tl.load(queries.lse2 + columns, mask=inside, other=float("inf")) != float("inf")
        query = load_tile(queries.query, start, kept, BLOCK_M, HEAD_DIM, BLOCK_D, ACCESS)
        products = tl.dot(rows.key, tl.trans(query), input_precision=PRECISION)
        if SIDE == MASKED:
            lse2 = tl.load(queries.lse2 + columns, mask=inside, other=float("inf"))
            delta = tl.load(queries.delta + columns, mask=inside, other=0.0)
        else:  # every row sees every column; Triton 3.6 copies masked vectors item by item
            lse2 = tl.load(queries.lse2 + columns)
            delta = tl.load(queries.delta + columns)
        if SIDE == MASKED:
            if LIMITED:
                turns = turned(columns[None, :], rows.first_turn[:, None], rows.last_turn[:, None], CAUSAL, MEETS)
            else:
                turns = turned(columns, first_turn, last_turn, CAUSAL, MEETS)[None, :]
            distance = tl.abs(turns - rows.center[:, None]).to(tl.float32)
            scores = scores_of(products, scale2, rows.slope2, distance, PACKED)
            weights = tl.exp2(scores - lse2[None, :])
            visible = (columns[None, :] >= rows.low[:, None]) & (columns[None, :] < rows.high[:, None])
            weights = tl.where(visible, weights, 0.0)
        else:
            turns = turned(columns, first_turn, last_turn, CAUSAL, MEETS)
            theirs = (SIDE * slope2) * (turns - reference).to(tl.float32) - lse2
            weights = tl.exp2(products * scale2 + theirs[None, :] + own[:, None])
        grad_out = load_tile(queries.grad_out, start, kept, BLOCK_M, HEAD_DIM, BLOCK_D, ACCESS)
        grad_weights = tl.dot(rows.value, tl.trans(grad_out), input_precision=PRECISION)
        kept_part = weights
        if dropout.seed is not None:
            keep = kept_weights(dropout, columns, rows.begin, BLOCK_M, BLOCK_N)
            keep = tl.trans(keep)
            kept_part = tl.where(keep, weights * dropout.inverse_keep, 0.0)
            grad_weights = tl.where(keep, grad_weights * dropout.inverse_keep, 0.0)
        grad_value = tl.dot(kept_part.to(grad_out.dtype), grad_out, grad_value, input_precision=PRECISION)
        grad_scores = weights * (grad_weights - delta[None, :])
        grad_key = tl.dot(grad_scores.to(query.dtype), query, grad_key, input_precision=PRECISION)
    return grad_key, grad_value


@kernel
def backward_key_kernel(
    grad_out,
    lse2,
    delta,
    key_ranges,  # not read unless `skips`
    query,
    key,
    value,
    slopes,
    query_start,
    key_padding_mask,
    dropout_seed,
    cu_seqlens_q,
    cu_seqlens_k,
    grad_key,
    grad_value,
    query_offset: tl.int64,
    window: tl.int64,
    scale: tl.float32,
    inverse_keep: tl.float32,
    dropout_threshold: tl.uint32,
    segment_length: tl.int32,
    num_heads: tl.int32,
    group_size: tl.int32,
    query_length: tl.int32,
    key_length: tl.int32,
    num_sequences: tl.int32,
    skips: tl.int32,
    stride_start: tl.int64,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gs: tl.int64,
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
    stride_wb: tl.int64,
    stride_wh: tl.int64,
    stride_ws: tl.int64,
    stride_mb: tl.int64,
    stride_ms: tl.int64,
    stride_slope_b: tl.int64,
    stride_slope_h: tl.int64,
    SEARCH_STEPS: tl.constexpr,
    CAUSAL: tl.constexpr,
    LIMITED: tl.constexpr,  # a window, segments or packed sequences limit the keys of a query
    HEAD_OFFSETS: tl.constexpr,  # dropout_seed is (batch, heads, 4)
    BLIND: tl.constexpr,  # some query may see no key, and hold NaN
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACCESS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Computes grad_key and grad_value, summed over the query heads that share a key head."""
    num_blocks = tl.cdiv(key_length, BLOCK_N)
    num_key_heads = num_heads // group_size
    program = tl.program_id(0)
    # Longest first: most queries see the early keys.
    block = program % num_blocks
    key_head = num_key_heads - 1 - program // num_blocks % num_key_heads
    batch = program // num_blocks // num_key_heads
    PACKED: tl.constexpr = cu_seqlens_q is not None
    MEETS: tl.constexpr = PACKED and query_start is None

    start = block * BLOCK_N
    index = start + tl.arange(0, BLOCK_N)
    row_start = None if PACKED else query_start
    query_offset = offset_of(index, key_length, row_start, query_offset, batch, None, stride_start)
    first, last, zero, sequence = opposite(
        index, batch, cu_seqlens_k, cu_seqlens_q, num_sequences, query_length, -query_offset, segment_length,
        LIMITED, SEARCH_STEPS,
    )  # fmt: skip
    far = far_of(query_offset, query_length, key_length)
    if PACKED and query_start is not None:
        moved, far = moved_queries(sequence, query_start, cu_seqlens_q, cu_seqlens_k, num_sequences, stride_start)
        zero -= moved
    low, high, center = visible_queries(first, last, zero, far, window, CAUSAL, LIMITED)
    inside = index < key_length
    if key_padding_mask is not None:
        key_padding_mask += batch * stride_mb
    kept = kept_keys(key_padding_mask, start, key_length, stride_ms, BLOCK_N)
    attended = inside
    if kept is not None:
        attended = attended & kept
    high = tl.where(attended, high, low)
    seen = low < high
    all_begin, all_full_begin, near_begin, near_end, all_full_end, all_end = split(low, high, center, BLOCK_M)
    distance = farthest(seen, center, all_full_begin, all_full_end)
    first_turn, last_turn = turns_of(
        index, center, far - query_offset, sequence, cu_seqlens_k, num_sequences, key_length, segment_length, LIMITED
    )
    first_turn_full, last_turn_full = first_turn, last_turn
    if LIMITED:  # in loops that are not masked, all rows have the same
        first_turn_full = tl.max(tl.where(seen, first_turn, -FAR), 0)
        last_turn_full = tl.max(tl.where(seen, last_turn, -FAR), 0)

    source = TileSource(key, batch, key_head, key_length, None, stride_kb, stride_kh, stride_ks)
    key_tile = load_tile(source, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ACCESS)
    source = TileSource(value, batch, key_head, key_length, None, stride_vb, stride_vh, stride_vs)
    value_tile = load_tile(source, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ACCESS)
    scale2 = scale * LOG2_E

    seed = None if dropout_seed is None else tl.load(dropout_seed)
    head_offsets = dropout_seed if HEAD_OFFSETS else None
    to_key = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    to_value = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for member in range(group_size):
        head = key_head * group_size + member
        row = batch * num_heads + head
        slope2, slope2_full = slopes_of(slopes, sequence, batch, head, stride_slope_b, stride_slope_h, seen, PACKED)
        begin, end = all_begin, all_end
        full_begin, full_end = all_full_begin, all_full_end
        if not PACKED:  # there it costs registers that spill
            linear = is_linear(slope2_full, distance, key_padding_mask is not None)
            full_begin = tl.where(linear, all_full_begin, near_begin)
            full_end = tl.where(linear, all_full_end, near_end)
        entry = key_ranges + (row.to(tl.int64) * num_blocks + block) * 2
        begin = tl.maximum(begin, tl.load(entry, mask=skips != 0, other=0))
        end = tl.minimum(end, tl.load(entry + 1, mask=skips != 0, other=FAR))
        begin = begin // BLOCK_M * BLOCK_M
        rows = KeyRows(key_tile, value_tile, low, high, center, slope2, start, first_turn, last_turn)
        queries = Queries(
            TileSource(query, batch, head, query_length, None, stride_qb, stride_qh, stride_qs),
            TileSource(grad_out, batch, head, query_length, None, stride_gb, stride_gh, stride_gs),
            lse2 + row.to(tl.int64) * query_length,
            delta + row.to(tl.int64) * query_length,
        )
        dropout = Dropout(seed, head_offsets, row, dropout_threshold, inverse_keep, None, num_heads, query_length)
        # Queries at the left end, the nearest, at the right end.
        for piece in range(1 if CAUSAL else 0, 3):
            piece_begin, piece_end = begin, full_begin
            if piece == 1:
                piece_begin, piece_end = near_begin, near_end
            if piece == 2:
                piece_begin, piece_end = full_end, end
            to_key, to_value = _over_queries(
                to_key, to_value, tl.maximum(piece_begin, begin), tl.minimum(piece_end, end), 0, 0.0,
                first_turn_full, last_turn_full, rows, queries, dropout, scale2, MASKED, CAUSAL, PACKED, MEETS, LIMITED,
                BLIND, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
            )  # fmt: skip
        to_key, to_value = _over_queries(
            to_key, to_value, tl.maximum(near_end, begin), tl.minimum(full_end, end), near_begin, slope2_full,
            first_turn_full, last_turn_full, rows, queries, dropout, scale2, RIGHT, CAUSAL, PACKED, MEETS, LIMITED,
            BLIND, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
        )  # fmt: skip
        if not CAUSAL:
            to_key, to_value = _over_queries(
                to_key, to_value, tl.maximum(begin, full_begin), tl.minimum(near_begin, end), near_begin, slope2_full,
                first_turn_full, last_turn_full, rows, queries, dropout, scale2, LEFT, CAUSAL, PACKED, MEETS, LIMITED,
                BLIND, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
            )  # fmt: skip

    to_key = tl.where(seen[:, None], to_key * scale, 0.0)
    store_tile(
        grad_key, to_key, batch, key_head, start, key_length, None, stride_ob, stride_oh, stride_os,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    to_value = tl.where(seen[:, None], to_value, 0.0)
    store_tile(
        grad_value, to_value, batch, key_head, start, key_length, None, stride_wb, stride_wh, stride_ws,
        BLOCK_N, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
