"""Backward, second kernel: one program for BLOCK_M queries computes their gradient over the keys that forward attended,
and the terms that all score gradients of a query share.

Programs share no sum, here and in triton_backward_key.py, so equal inputs give equal bits. With
P = exp(score − lse), delta = Σ P ∘ dP − dlse and dS = P ∘ (dP − delta):

    dQ = scale · dS · K      dK = scale · dSᵀ · Q      dV = Pᵀ · dO      dslope = −Σ dS ∘ distance
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..triton_launch import kernel
from .triton_tiles import (
    LEFT,
    LOG2_E,
    MASKED,
    RIGHT,
    Dropout,
    Keys,
    TileSource,
    attended_keys,
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
    store_tile,
    tile_pointers,
    visible_keys,
    widen,
)


class QueryRows(NamedTuple):
    """A tile of queries, and the keys that each row sees."""

    query: Any
    grad_out: Any
    delta: Any
    log2_sum: Any  # distances count from the center; +∞ where a row saw no key
    index: Any
    low: Any
    high: Any
    center: Any
    slope2: Any
    begin: Any  # of the keys that any row sees
    end: Any


@triton.jit
def _over_keys(
    grad_query,
    grad_slope,
    begin,
    end,
    reference,
    slope2,
    rows,
    keys,
    dropout,
    scale2,
    SIDE: tl.constexpr,
    PACKED: tl.constexpr,
    SLOPES: tl.constexpr,
    HIDES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ACCESS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    zero = rows.log2_sum + (SIDE * slope2) * (rows.center - reference).to(tl.float32)
    for start in tl.range(begin, end, BLOCK_N):
        columns = start + tl.arange(0, BLOCK_N)
        kept = kept_keys(keys.mask, start, keys.key.length, keys.stride_mask, BLOCK_N)
        if HIDES and SIDE == MASKED:
            kept = seen_columns(rows, columns, kept, PACKED)
        elif PACKED and SIDE == MASKED:  # tokens outside of the sequences may hold NaN
            kept = (columns >= tl.min(rows.low, 0)) & (columns < tl.max(rows.high, 0))
        key = load_tile(keys.key, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ACCESS)
        products = tl.dot(rows.query, tl.trans(key), input_precision=PRECISION)
        if SIDE == MASKED:
            distance = tl.abs(rows.center[:, None] - columns[None, :]).to(tl.float32)
            scores = scores_of(products, scale2, rows.slope2, distance, PACKED)
            weights = tl.exp2(scores - zero[:, None])
            visible = (columns[None, :] >= rows.low[:, None]) & (columns[None, :] < rows.high[:, None])
            if kept is not None:
                visible = visible & kept[None, :]
            weights = tl.where(visible, weights, 0.0)
        else:
            bias = (SIDE * slope2) * (columns - reference).to(tl.float32)
            if kept is not None:
                bias = tl.where(kept, bias, float("-inf"))
            weights = tl.exp2(products * scale2 + bias[None, :] - zero[:, None])
        value = load_tile(keys.value, start, kept, BLOCK_N, HEAD_DIM, BLOCK_D, ACCESS)
        grad_weights = tl.dot(rows.grad_out, tl.trans(value), input_precision=PRECISION)
        if dropout.seed is not None:
            keep = kept_weights(dropout, rows.index, start, BLOCK_M, BLOCK_N)
            grad_weights = tl.where(keep, grad_weights * dropout.inverse_keep, 0.0)
        grad_scores = weights * (grad_weights - rows.delta[:, None])
        if SLOPES:
            if SIDE != MASKED:
                distance = SIDE * (rows.center[:, None] - columns[None, :]).to(tl.float32)
            grad_slope -= tl.sum(grad_scores * distance, 1)
        grad_query = tl.dot(grad_scores.to(key.dtype), key, grad_query, input_precision=PRECISION)
    return grad_query, grad_slope


@kernel
def backward_query_kernel(
    grad_out,
    grad_lse,  # None: zeros
    out,
    log2_sum,
    ranges,
    query,
    key,
    value,
    slopes,
    query_start,
    key_padding_mask,
    dropout_seed,
    cu_seqlens_q,
    cu_seqlens_k,
    delta,
    lse2,
    grad_query,
    grad_slope_rows,
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
    stride_start: tl.int64,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gs: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_ls: tl.int64,
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
    HIDES: tl.constexpr,  # no query may see some keys, which may hold NaN
):
    """Computes grad_query, the contribution of each query to grad_slopes (unless None), delta, and lse2: log2_sum, and
    +∞ for queries without a key."""
    num_blocks = tl.cdiv(query_length, BLOCK_M)
    program = tl.program_id(0)
    # Longest first: late queries see most keys, and the last heads have the flattest slopes.
    block = num_blocks - 1 - program % num_blocks
    head = num_heads - 1 - program // num_blocks % num_heads
    batch = program // num_blocks // num_heads
    key_head = head // group_size
    row = batch * num_heads + head
    PACKED: tl.constexpr = cu_seqlens_q is not None
    SLOPES: tl.constexpr = grad_slope_rows is not None

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
    inside = index < query_length
    high = tl.where(inside, high, low)
    sees_some = low < high
    slope2, slope2_full = slopes_of(slopes, sequence, batch, head, stride_slope_b, stride_slope_h, sees_some, PACKED)
    begin, full_begin, near_begin, near_end, full_end, end = split(low, high, center, BLOCK_N)
    seen_begin, seen_end = begin, end
    distance = farthest(sees_some, center, full_begin, full_end)
    linear = is_linear(slope2_full, distance, key_padding_mask is not None)
    full_begin, near_begin, near_end, full_end = widen(
        linear, begin, full_begin, near_begin, near_end, full_end, end, BLOCK_N
    )
    attended_begin, attended_end = attended_keys(ranges, block, row, query_length, BLOCK_M)
    begin, end = tl.maximum(begin, attended_begin), tl.minimum(end, attended_end)
    begin = begin // BLOCK_N * BLOCK_N
    scale2 = scale * LOG2_E

    start = block * BLOCK_M
    source = TileSource(query, batch, head, query_length, None, stride_qb, stride_qh, stride_qs)
    query_tile = load_tile(source, start, None, BLOCK_M, HEAD_DIM, BLOCK_D, ACCESS)
    source = TileSource(grad_out, batch, head, query_length, None, stride_gb, stride_gh, stride_gs)
    grad_tile = load_tile(source, start, None, BLOCK_M, HEAD_DIM, BLOCK_D, ACCESS)
    row_offset = row.to(tl.int64) * query_length + index
    row_log2 = tl.load(log2_sum + row_offset, mask=inside, other=float("-inf"))
    seen = sees_some & (row_log2 != float("-inf"))
    row_log2 = tl.where(seen, row_log2, float("inf"))
    tl.store(lse2 + row_offset, row_log2, mask=inside)
    pointers, present = tile_pointers(
        out, batch, head, start, query_length, None, stride_ob, stride_oh, stride_os, BLOCK_M, HEAD_DIM, BLOCK_D
    )
    out_tile = tl.load(pointers, mask=present, other=0.0)
    row_delta = tl.where(seen, tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1), 0.0)  # Σ P ∘ dP
    grad_slope = tl.zeros((BLOCK_M,), tl.float32)
    if grad_lse is not None:
        grad_lse += batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
        row_grad_lse = tl.load(grad_lse + index.to(tl.int64) * stride_ls, mask=seen, other=0.0)
        row_delta -= row_grad_lse
        grad_slope = -beyond * row_grad_lse
    tl.store(delta + row_offset, row_delta, mask=inside)

    rows = QueryRows(query_tile, grad_tile, row_delta, row_log2, index, low, high, center, slope2, seen_begin, seen_end)
    if key_padding_mask is not None:
        key_padding_mask += batch * stride_mb
    keys = Keys(
        TileSource(key, batch, key_head, key_length, None, stride_kb, stride_kh, stride_ks),
        TileSource(value, batch, key_head, key_length, None, stride_vb, stride_vh, stride_vs),
        key_padding_mask,
        stride_ms,
    )
    seed = None if dropout_seed is None else tl.load(dropout_seed)
    head_offsets = dropout_seed if HEAD_OFFSETS else None
    dropout = Dropout(seed, head_offsets, row, dropout_threshold, inverse_keep, None, num_heads, query_length)

    gradient = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for piece in range(0 if LIMITED else 1, 2 if CAUSAL else 3):  # keys at the left end, the nearest, at the right end
        piece_begin, piece_end = begin, full_begin
        if piece == 1:
            piece_begin, piece_end = near_begin, tl.minimum(near_end, end)
        if piece == 2:
            piece_begin, piece_end = full_end, end
        gradient, grad_slope = _over_keys(
            gradient, grad_slope, piece_begin, piece_end, 0, 0.0, rows, keys, dropout, scale2,
            MASKED, PACKED, SLOPES, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
        )  # fmt: skip
    gradient, grad_slope = _over_keys(
        gradient, grad_slope, tl.maximum(begin, full_begin), near_begin, near_begin, slope2_full, rows, keys,
        dropout, scale2, LEFT, PACKED, SLOPES, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
    )  # fmt: skip
    if not CAUSAL:
        gradient, grad_slope = _over_keys(
            gradient, grad_slope, near_end, tl.minimum(full_end, end), near_begin, slope2_full, rows, keys,
            dropout, scale2, RIGHT, PACKED, SLOPES, HIDES, HEAD_DIM, BLOCK_D, BLOCK_M, BLOCK_N, ACCESS, PRECISION,
        )  # fmt: skip

    gradient = tl.where(seen[:, None], gradient * scale, 0.0)
    store_tile(
        grad_query, gradient, batch, head, start, query_length, None, stride_ob, stride_oh, stride_os,
        BLOCK_M, HEAD_DIM, BLOCK_D,
    )  # fmt: skip
    if SLOPES:
        tl.store(grad_slope_rows + row_offset, tl.where(seen, grad_slope, 0.0), mask=inside)
