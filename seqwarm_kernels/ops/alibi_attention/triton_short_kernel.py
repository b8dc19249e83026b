"""Forward and backward of short rows: one program handles the queries and the keys of as many rows as fit into a tile.

Tokens count on from one row of the batch to the next. Rows here are segments, where there are segments.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..triton_launch import kernel
from .schema import RANGE_BLOCK
from .triton_tiles import (
    ALIGNED,
    LN_2,
    LOG2_E,
    Dropout,
    TileSource,
    in_base_2,
    kept_keys,
    kept_weights,
    load_tile,
    offset_of,
    opposite,
    scores_of,
    store_tile,
    tile_pointers,
    token_offsets,
    visible_keys,
)

_RANGE_BLOCK = tl.constexpr(RANGE_BLOCK)


class Tokens(NamedTuple):
    """The tokens of a tile, which are queries and keys, and the keys that each query sees."""

    index: Any
    kept: Any  # (BLOCK,) bool: keys of the tile that are not masked
    low: Any
    high: Any
    center: Any
    beyond: Any


@triton.jit
def _kept_of(start, end, key_padding_mask, BLOCK: tl.constexpr):
    kept = start + tl.arange(0, BLOCK) < end
    if key_padding_mask is not None:
        kept = kept_keys(key_padding_mask, start, end, 1, BLOCK)
    return kept


@triton.jit
def _tokens_of(
    start, end, query_start, key_padding_mask, query_offset, window, segment_length, row_length, stride_start,
    CAUSAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = start + tl.arange(0, BLOCK)
    kept = _kept_of(start, end, key_padding_mask, BLOCK)
    offset = offset_of(index, end, query_start, query_offset, None, row_length, stride_start)
    first, last, position, _ = opposite(index, 0, None, None, 0, end, offset, segment_length, True, 0)
    low, high, center, beyond = visible_keys(first, last, position, window, CAUSAL, True)
    return Tokens(index, kept, low, tl.where(index < end, high, low), center, beyond)


@triton.jit
def _scores(query, key, tokens, slope2, scale2, PRECISION: tl.constexpr):
    """Scores in base 2, distances, and which of them count, each (queries, keys)."""
    columns = tokens.index[None, :]
    distance = tl.abs(tokens.center[:, None] - columns).to(tl.float32)
    scores = scores_of(tl.dot(query, tl.trans(key), input_precision=PRECISION), scale2, slope2, distance, False)
    visible = (columns >= tokens.low[:, None]) & (columns < tokens.high[:, None]) & tokens.kept[None, :]
    return scores, distance, visible


@triton.jit
def _finite(tile):
    """The tile with zeros in each row that has NaN or infinity, and NaN for these rows, else 0.

    In a product that sums over the rows of a tile, a weight of 0 would not keep a NaN of one row out of the others. So
    what a row sees makes its weights NaN instead."""
    nan = tl.sum(tile.to(tl.float32) * 0, 1)
    return tl.where((nan == 0)[:, None], tile, 0.0), nan


@triton.jit
def _row_offsets(index, head, num_heads, row_length):
    """Of tokens in a (batch, heads, tokens) tensor."""
    length = row_length.to(tl.int64)
    return head * length + token_offsets(index, row_length, num_heads * length, 1)


@triton.jit
def _store_ranges(ranges, index, end, head, num_heads, unit, row_length):
    """Store that the queries of each block attended all keys of their row, up to the last one of a segment."""
    num_ranges = tl.cdiv(row_length, _RANGE_BLOCK)
    row, token = (index // row_length).to(tl.int64) * num_heads + head, index % row_length
    pointers = ranges + (row * num_ranges + token // _RANGE_BLOCK) * 2
    first = (index < end) & (token % _RANGE_BLOCK == 0)
    tl.store(pointers, token // unit * unit, mask=first)
    last = tl.minimum(token + _RANGE_BLOCK, row_length) - 1
    tl.store(pointers + 1, last // unit * unit + unit, mask=first)


@kernel
def short_forward_kernel(
    query,
    key,
    value,
    slopes,
    query_start,
    key_padding_mask,
    dropout_seed,
    out,
    lse,
    log2_sum,
    ranges,
    query_offset: tl.int64,
    window: tl.int64,
    scale: tl.float32,
    inverse_keep: tl.float32,
    dropout_threshold: tl.uint32,
    segment_length: tl.int32,  # divides row_length
    tile_tokens: tl.int32,  # a multiple of segment_length
    num_heads: tl.int32,
    group_size: tl.int32,
    num_tokens: tl.int32,  # of the batch
    row_length: tl.int32,
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
    stride_slope_h: tl.int64,
    CAUSAL: tl.constexpr,
    HEAD_OFFSETS: tl.constexpr,  # dropout_seed is (batch, heads, 4)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0) % num_heads  # heads of a token are neighbors in memory, or nearly so
    key_head = head // group_size
    start = tl.program_id(0) // num_heads * tile_tokens
    end = tl.minimum(start + tile_tokens, num_tokens)
    tokens = _tokens_of(
        start, end, query_start, key_padding_mask, query_offset, window, segment_length, row_length, stride_start,
        CAUSAL, BLOCK,
    )  # fmt: skip
    source = TileSource(query, None, head, end, row_length, stride_qb, stride_qh, stride_qs)
    query_tile = load_tile(source, start, None, BLOCK, HEAD_DIM, BLOCK_D, ALIGNED)
    source = TileSource(key, None, key_head, end, row_length, stride_kb, stride_kh, stride_ks)
    key_tile = load_tile(source, start, tokens.kept, BLOCK, HEAD_DIM, BLOCK_D, ALIGNED)
    source = TileSource(value, None, key_head, end, row_length, stride_vb, stride_vh, stride_vs)
    value_tile, value_nan = _finite(load_tile(source, start, tokens.kept, BLOCK, HEAD_DIM, BLOCK_D, ALIGNED))
    slope2 = in_base_2(tl.load(slopes + head * stride_slope_h))

    scores, _, visible = _scores(query_tile, key_tile, tokens, slope2, scale * LOG2_E, PRECISION)
    scores = tl.where(visible, scores, float("-inf"))
    largest = tl.max(scores, 1)
    weights = tl.exp2(scores - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    total = tl.sum(weights, 1)
    if dropout_seed is not None:
        head_offsets = dropout_seed if HEAD_OFFSETS else None
        seed = tl.load(dropout_seed)
        dropout = Dropout(seed, head_offsets, head, dropout_threshold, inverse_keep, row_length, num_heads, num_tokens)
        weights = tl.where(kept_weights(dropout, tokens.index, start, BLOCK, BLOCK), weights, 0.0)
    weights = tl.where(visible, weights + value_nan[None, :], 0.0)
    attended = tl.dot(weights.to(value_tile.dtype), value_tile, input_precision=PRECISION)

    empty = total == 0  # False for NaN, which must reach the output
    attended = tl.where(empty[:, None], 0.0, attended * (inverse_keep / tl.where(empty, 1.0, total))[:, None])
    store_tile(
        out, attended, None, head, start, end, row_length, stride_ob, stride_oh, stride_os, BLOCK, HEAD_DIM, BLOCK_D
    )
    inside = tokens.index < end
    offsets = _row_offsets(tokens.index, head, num_heads, row_length)
    row_log2 = tl.where(empty, float("-inf"), largest + tl.log2(total))
    tl.store(log2_sum + offsets, row_log2, mask=inside)
    row_lse = tl.where(empty, float("-inf"), (row_log2 - slope2 * tokens.beyond) * LN_2)
    tl.store(lse + offsets, row_lse, mask=inside)
    _store_ranges(ranges, tokens.index, end, head, num_heads, segment_length, row_length)


@kernel
def short_backward_kernel(
    grad_out,
    grad_lse,  # None: zeros
    out,
    log2_sum,
    query,
    key,
    value,
    slopes,
    query_start,
    key_padding_mask,
    dropout_seed,
    grad_query,
    grad_key,
    grad_value,
    grad_slope_rows,  # None: not wanted
    query_offset: tl.int64,
    window: tl.int64,
    scale: tl.float32,
    inverse_keep: tl.float32,
    dropout_threshold: tl.uint32,
    segment_length: tl.int32,  # divides row_length
    tile_tokens: tl.int32,  # a multiple of segment_length
    num_heads: tl.int32,
    group_size: tl.int32,
    num_tokens: tl.int32,  # of the batch
    row_length: tl.int32,
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
    stride_ob: tl.int64,  # of out and grad_query
    stride_oh: tl.int64,
    stride_os: tl.int64,
    stride_xb: tl.int64,  # of grad_key
    stride_xh: tl.int64,
    stride_xs: tl.int64,
    stride_yb: tl.int64,  # of grad_value
    stride_yh: tl.int64,
    stride_ys: tl.int64,
    stride_slope_h: tl.int64,
    CAUSAL: tl.constexpr,
    GROUPED: tl.constexpr,  # query heads share key heads. Without them, sums need no registers
    HEAD_OFFSETS: tl.constexpr,  # dropout_seed is (batch, heads, 4)
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """All gradients: of queries, and of keys and values, summed over the query heads that share a key head.

    triton_backward_query.py has the formulas."""
    num_key_heads = num_heads // group_size
    key_head = tl.program_id(0) % num_key_heads
    first = tl.program_id(0) // num_key_heads * tile_tokens
    end = tl.minimum(first + tile_tokens, num_tokens)
    kept = _kept_of(first, end, key_padding_mask, BLOCK)
    source = TileSource(key, None, key_head, end, row_length, stride_kb, stride_kh, stride_ks)
    key_tile, key_nan = _finite(load_tile(source, first, kept, BLOCK, HEAD_DIM, BLOCK_D, ALIGNED))
    source = TileSource(value, None, key_head, end, row_length, stride_vb, stride_vh, stride_vs)
    value_tile = load_tile(source, first, kept, BLOCK, HEAD_DIM, BLOCK_D, ALIGNED)
    to_key = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    to_value = tl.zeros((BLOCK, BLOCK_D), tl.float32)
    members = group_size if GROUPED else 1
    for member in tl.range(members, disable_licm=True):
        head = key_head * group_size + member
        start = first + member // members  # is `first`, but what depends on it takes no registers across the loop
        tokens = _tokens_of(
            start, end, query_start, key_padding_mask, query_offset, window, segment_length, row_length, stride_start,
            CAUSAL, BLOCK,
        )  # fmt: skip
        inside = tokens.index < end
        source = TileSource(query, None, head, end, row_length, stride_qb, stride_qh, stride_qs)
        query_tile = load_tile(source, start, None, BLOCK, HEAD_DIM, BLOCK_D, ALIGNED)
        finite_query, _ = _finite(query_tile)  # its sums of forward are not finite, either
        source = TileSource(grad_out, None, head, end, row_length, stride_gb, stride_gh, stride_gs)
        grad_tile = load_tile(source, start, None, BLOCK, HEAD_DIM, BLOCK_D, ALIGNED)
        finite_grad, _ = _finite(grad_tile)  # its delta is not finite, either
        pointers, present = tile_pointers(
            out, None, head, start, end, row_length, stride_ob, stride_oh, stride_os, BLOCK, HEAD_DIM, BLOCK_D
        )
        out_tile = tl.load(pointers, mask=present, other=0.0)
        offsets = _row_offsets(tokens.index, head, num_heads, row_length)
        row_log2 = tl.load(log2_sum + offsets, mask=inside, other=float("-inf"))
        seen = row_log2 != float("-inf")
        delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)  # Σ P ∘ dP
        grad_slope = tl.zeros((BLOCK,), tl.float32)
        if grad_lse is not None:
            steps = token_offsets(tokens.index, row_length, stride_lb, stride_ls)
            row_grad_lse = tl.load(grad_lse + head * stride_lh + steps, mask=seen, other=0.0)
            delta -= row_grad_lse
            grad_slope = -tokens.beyond * row_grad_lse

        slope2 = in_base_2(tl.load(slopes + head * stride_slope_h))
        scores, distance, visible = _scores(query_tile, key_tile, tokens, slope2, scale * LOG2_E, PRECISION)
        visible = visible & seen[:, None]
        weights = tl.exp2(scores - (row_log2 + delta * 0)[:, None] + key_nan[None, :])
        weights = tl.where(visible, weights, 0.0)
        grad_weights = tl.dot(grad_tile, tl.trans(value_tile), input_precision=PRECISION)
        kept_part = weights
        if dropout_seed is not None:
            head_offsets = dropout_seed if HEAD_OFFSETS else None
            seed = tl.load(dropout_seed)
            dropout = Dropout(
                seed, head_offsets, head, dropout_threshold, inverse_keep, row_length, num_heads, num_tokens
            )
            keep = kept_weights(dropout, tokens.index, start, BLOCK, BLOCK)
            kept_part = tl.where(keep, weights * inverse_keep, 0.0)
            grad_weights = tl.where(keep, grad_weights * inverse_keep, 0.0)
        grad_scores = tl.where(visible, weights * (grad_weights - delta[:, None]), 0.0)
        kept_part = kept_part.to(grad_tile.dtype)
        to_value = tl.dot(tl.trans(kept_part), finite_grad, to_value, input_precision=PRECISION)
        if member == members - 1:
            store_tile(
                grad_value, to_value, None, key_head, start, end, row_length, stride_yb, stride_yh, stride_ys, BLOCK,
                HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        if grad_slope_rows is not None:
            grad_slope -= tl.sum(grad_scores * distance, 1)
            tl.store(grad_slope_rows + offsets, tl.where(seen, grad_slope, 0.0), mask=inside)
        grad_scores = grad_scores.to(query_tile.dtype)
        to_key = tl.dot(tl.trans(grad_scores), finite_query, to_key, input_precision=PRECISION)
        if member == members - 1:
            store_tile(
                grad_key, to_key * scale, None, key_head, start, end, row_length, stride_xb, stride_xh, stride_xs,
                BLOCK, HEAD_DIM, BLOCK_D,
            )  # fmt: skip
        to_query = tl.dot(grad_scores, key_tile, input_precision=PRECISION)
        store_tile(
            grad_query, to_query * scale, None, head, start, end, row_length, stride_ob, stride_oh, stride_os, BLOCK,
            HEAD_DIM, BLOCK_D,
        )  # fmt: skip
