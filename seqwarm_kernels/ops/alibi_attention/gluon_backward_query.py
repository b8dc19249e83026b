"""Gradients of queries for Hopper in Gluon, and the terms that all score gradients of a query share.

triton_backward_query.py has the formulas. The order of a consumer's iteration, of which the first product of a tile and
the last of the tile before run beside the exponentials:

    start scores of tile i, dO · Vᵀ of tile i, and dS · K of tile i − 1; wait for the scores; exponentials; wait for all
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_blocks import (
    Call,
    Shared,
    find_block,
    keys_of,
    make_numbers,
    produce,
    received_work,
    scores_of_tile,
    tile_start,
)
from .gluon_tiles import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    arrival,
    copy_out,
    gluon_kernel,
    make_pipe,
    make_tiles,
    product_layout,
    release,
    row_layout,
    tile_of,
)
from .triton_tiles import LOG2_E


class Terms(NamedTuple):
    """What a query adds up, and what the gradients of keys read."""

    log2_sum: Any
    grad_lse: Any  # None: zeros
    stride_lb: Any
    stride_lh: Any
    stride_ls: Any
    lse2: Any
    delta: Any
    stride_rows: Any


class Results(NamedTuple):
    grad_query: Any
    grad_slopes: Any  # the contribution of each query, or None
    tiles: Any  # of grad_query, in shared memory


@gluon.jit
def _row_terms(half, terms, shared, block, call, index, BLOCK_D: gl.constexpr, BY_ROW: gl.constexpr):
    """lse2 and delta of each query, which are stored, too."""
    LAYOUT: gl.constexpr = row_layout(BLOCK_D)
    grad_out = tile_of(shared.grad_out, half, 2).load(LAYOUT).to(gl.float32)
    out = tile_of(shared.out, half, 2).load(LAYOUT).to(gl.float32)
    row_delta = gl.convert_layout(gl.sum(out * grad_out, 1), BY_ROW)
    inside = index < call.query_length
    offsets = block.row.to(gl.int64) * call.query_length + index
    row_log2 = gl.load(terms.log2_sum + offsets, mask=inside, other=float("-inf"))
    seen = row_log2 != float("-inf")
    row_log2 = gl.where(seen, row_log2, float("inf"))
    row_delta = gl.where(seen, row_delta, 0.0)
    if terms.grad_lse is not None:
        start = terms.grad_lse + block.batch.to(gl.int64) * terms.stride_lb + block.head.to(gl.int64) * terms.stride_lh
        row_delta -= gl.load(start + index.to(gl.int64) * terms.stride_ls, mask=seen, other=0.0)
    offsets = block.row.to(gl.int64) * terms.stride_rows + index
    gl.store(terms.lse2 + offsets, row_log2)
    gl.store(terms.delta + offsets, row_delta)
    return row_log2, row_delta


@gluon.jit
def _consume(
    half, results, terms, shared, call, scale, CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    OUT: gl.constexpr = product_layout(BLOCK_D)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    SLOPES: gl.constexpr = results.grad_slopes is not None
    dtype: gl.constexpr = results.grad_query.dtype
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    blank = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    query = tile_of(shared.query, half, 2)
    grad_out = tile_of(shared.grad_out, half, 2)
    work = gl.program_id(0)
    blocks = 0
    tiles = 0
    while work < call.num_works:
        block = find_block(work, call, CAUSAL, LIMITED, BLOCK_N)
        index = block.first + half * ROWS + gl.arange(0, ROWS, layout=BY_ROW)
        low, high, center, _ = keys_of(index, block.offset, call, CAUSAL, LIMITED)
        column_bias = (block.slope2 * columns.to(gl.float32))[None, :]
        arrival(shared.query_pipe, 2 * blocks + half, 2)
        row_log2, row_delta = _row_terms(half, terms, shared, block, call, index, BLOCK_D, BY_ROW)
        row_slopes = gl.zeros([ROWS], gl.float32, layout=BY_ROW)
        gradient = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
        operand = gl.convert_layout(gl.zeros([ROWS, BLOCK_N], dtype, layout=SCORES), WEIGHTS)
        arrival(shared.key_pipe, tiles, K_STAGES)
        for i in range(tiles, tiles + block.count):
            start = tile_start(i - tiles, block.left, block.top, BLOCK_N)
            key = tile_of(shared.key, i, K_STAGES)
            products = warpgroup_mma(query, key.permute((1, 0)), blank, use_acc=False, is_async=True)
            arrival(shared.value_pipe, i, V_STAGES)
            value = tile_of(shared.value, i, V_STAGES)
            grad_weights = warpgroup_mma(grad_out, value.permute((1, 0)), blank, use_acc=False, is_async=True)
            before = gl.maximum(i - 1, tiles)  # the first product is of zeros
            gradient = warpgroup_mma(operand, tile_of(shared.key, before, K_STAGES), gradient, is_async=True)
            products = warpgroup_mma_wait(2, deps=(products,))
            scores, shift = scores_of_tile(
                products, low, high, center, column_bias, block, start, call.scale2, CAUSAL, LIMITED, BLOCK_N, SCORES
            )
            weights = gl.exp2(scores - (row_log2 + shift)[:, None])
            arrival(shared.key_pipe, i + 1, K_STAGES, pred=i + 1 < tiles + block.count)
            grad_weights, weights = warpgroup_mma_wait(1, deps=(grad_weights, weights))
            release(shared.value_pipe, i, V_STAGES)
            grad_scores = weights * (grad_weights - row_delta[:, None])
            if SLOPES:
                distance = gl.abs(center[:, None] - (start + columns)[None, :]).to(gl.float32)
                row_slopes -= gl.sum(grad_scores * distance, 1)
            gradient, grad_scores = warpgroup_mma_wait(0, deps=(gradient, grad_scores))
            if i > tiles:
                release(shared.key_pipe, i - 1, K_STAGES)
            operand = gl.convert_layout(grad_scores.to(dtype), WEIGHTS)
        release(shared.query_pipe, 2 * blocks + half, 2)
        tiles += block.count
        gradient = warpgroup_mma(operand, tile_of(shared.key, tiles - 1, K_STAGES), gradient, is_async=True)
        gradient = warpgroup_mma_wait(0, deps=(gradient,))
        release(shared.key_pipe, tiles - 1, K_STAGES)

        tma.store_wait(0)  # of the last block
        tile_of(results.tiles, half, 2).store((gradient * scale).to(dtype))
        fence_async_shared()
        place = [block.batch, block.head, block.first + half * ROWS, 0]
        copy_out(results.grad_query, place, results.tiles.index(half))
        if SLOPES:
            offsets = block.row.to(gl.int64) * call.query_length + index
            gl.store(results.grad_slopes + offsets, row_slopes, mask=index < call.query_length)
        work = received_work(shared.work, shared.work_pipe, blocks)
        blocks += 1
    tma.store_wait(0)


@gluon_kernel
def gluon_backward_query_kernel(
    query, grad_out, out, key, value, slopes, query_start, ranges, grad_lse, log2_sum, lse2, delta, grad_query,
    grad_slopes, counter,
    query_offset: tl.int64, window: tl.int64, scale: tl.float32, segment_length: tl.int32, num_heads: tl.int32,
    group_size: tl.int32, query_length: tl.int32, key_length: tl.int32, num_works: tl.int32, stride_start: tl.int64,
    stride_slope_b: tl.int64, stride_slope_h: tl.int64,
    stride_lb: tl.int64, stride_lh: tl.int64, stride_ls: tl.int64, stride_rows: tl.int32,
    CAUSAL: tl.constexpr, LIMITED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    K_STAGES: tl.constexpr, V_STAGES: tl.constexpr,
):  # fmt: skip
    """Computes grad_query, the contribution of each query to grad_slopes (unless None), delta, and lse2: log2_sum, and
    +∞ for queries without a key. The last two have `stride_rows` entries for each head, a multiple of 2 · ROWS."""
    gl.static_assert((K_STAGES >= 3) & (V_STAGES >= 2), "a consumer holds tiles while it waits for the next keys")
    call = Call(
        query_start, slopes, ranges, None, float("-inf"), query_offset, window, scale * LOG2_E, segment_length,
        num_heads, group_size, query_length, key_length, stride_start, stride_slope_b, stride_slope_h, num_works,
        counter,
    )  # fmt: skip
    shared = Shared(
        make_tiles(query, ROWS, BLOCK_D, 2),
        make_tiles(grad_out, ROWS, BLOCK_D, 2),
        make_tiles(out, ROWS, BLOCK_D, 2),
        make_tiles(key, BLOCK_N, BLOCK_D, K_STAGES),
        make_tiles(value, BLOCK_N, BLOCK_D, V_STAGES),
        make_numbers(2),
        None,
        None,
        make_pipe(2, 1),
        make_pipe(K_STAGES, 2),
        make_pipe(V_STAGES, 2),
        make_pipe(2, 2),
        None,
    )
    fence_async_shared()
    terms = Terms(log2_sum, grad_lse, stride_lb, stride_lh, stride_ls, lse2, delta, stride_rows)
    results = Results(grad_query, grad_slopes, make_tiles(grad_query, ROWS, BLOCK_D, 2))
    gl.warp_specialize(
        [
            (_consume, (0, results, terms, shared, call, scale, CAUSAL, LIMITED, BLOCK_D, BLOCK_N, K_STAGES, V_STAGES)),
            (_consume, (1, results, terms, shared, call, scale, CAUSAL, LIMITED, BLOCK_D, BLOCK_N, K_STAGES, V_STAGES)),
            (produce, (query, grad_out, out, key, value, shared, call, CAUSAL, LIMITED, BLOCK_N, K_STAGES, V_STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
