"""Forward for Hopper in Gluon: a producer and two consumers, each of which overlaps its softmax with a matrix product.

The order of a consumer's iteration, after FlashAttention-3 (Shah et al., 2024, arXiv 2407.08608, section 3.2):

    start scores of tile i; start weights · values of tile i − 1; wait for the scores; softmax; wait for the values

The compiler would move the exponentials behind the second wait. A wait for the next keys holds them in their place.
After the tiles next to the queries each consumer tells how far it reaches (triton_reach.py).
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
    largest_norm,
    make_numbers,
    produce,
    received_work,
    scores_of_tile,
    store_attended,
    tile_start,
    within_reach,
)
from .gluon_tiles import (
    CONSUMER_REGISTERS,
    LOWEST,
    PRODUCER_REGISTERS,
    ROWS,
    arrival,
    copy_out,
    gluon_kernel,
    make_pipe,
    make_tiles,
    product_layout,
    release,
    release_full,
    row_layout,
    tile_of,
)
from .triton_reach import reach
from .triton_tiles import LN_2, LOG2_E


class Results(NamedTuple):
    out: Any
    lse: Any
    log2_sum: Any
    ranges: Any
    tiles: Any  # of out, in shared memory


@gluon.jit
def _soften(
    products, largest, total, low, high, center, column_bias, block, start, scale2,
    CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Weights of a tile relative to the largest score so far, that score, the sum of weights, and how it decayed."""
    scores, shift = scores_of_tile(
        products, low, high, center, column_bias, block, start, scale2, CAUSAL, LIMITED, BLOCK_N, SCORES
    )
    new_largest = gl.maximum(largest, gl.max(scores, 1) - shift)
    weights = gl.exp2(scores - (new_largest + shift)[:, None])
    decay = gl.exp2(largest - new_largest)
    return weights, new_largest, total * decay + gl.sum(weights, 1), decay


@gluon.jit
def _report_reach(
    half,
    reports,
    query,
    low,
    high,
    center,
    largest,
    total,
    shared,
    block,
    call,
    CAUSAL: gl.constexpr,
    BY_ROW: gl.constexpr,
):
    """Report to the producer and the other consumer the first and last key within reach of this one's queries."""
    tile = query.load(row_layout(query.shape[1])).to(gl.float32)
    norm = gl.sqrt(gl.convert_layout(gl.sum(tile * tile, 1), BY_ROW))
    known = largest + gl.log2(total)
    some = low < high
    key_row = block.batch * (call.num_heads // call.group_size) + block.head // call.group_size
    largest_key = largest_norm(call.norms, key_row, block.begin, block.near_begin, call.key_length)
    distance = reach(norm, largest_key, call.scale2, block.slope2, known, call.log2_tolerance)
    begin = gl.min(gl.where(some, center - distance, block.near_begin), 0)
    begin = gl.minimum(gl.maximum(begin, block.begin), block.near_begin)
    end = block.end
    if not CAUSAL:
        largest_key = largest_norm(call.norms, key_row, block.near_end, block.end, call.key_length)
        distance = reach(norm, largest_key, call.scale2, block.slope2, known, call.log2_tolerance)
        last = gl.max(gl.where(some, center + distance, 0), 0)
        end = gl.minimum(end, gl.maximum(last + 1, block.near_end))
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    slot = 2 * (reports % 2) + half
    shared.begin.index(slot).store(gl.full([1], begin, gl.int32, layout=LAYOUT))
    shared.end.index(slot).store(gl.full([1], end, gl.int32, layout=LAYOUT))
    release_full(shared.reach_pipe, reports, 2)


@gluon.jit
def _consume(
    half, results, shared, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = product_layout(BLOCK_N)
    OUT: gl.constexpr = product_layout(BLOCK_D)
    BY_ROW: gl.constexpr = gl.SliceLayout(1, SCORES)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    dtype: gl.constexpr = results.out.dtype
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES))
    blank = gl.zeros([ROWS, BLOCK_N], gl.float32, layout=SCORES)
    query = tile_of(shared.query, half, 2)
    work = gl.program_id(0)
    blocks = 0
    tiles = 0
    reports = 0
    while work < call.num_works:
        block = find_block(work, call, CAUSAL, LIMITED, BLOCK_N)
        index = block.first + half * ROWS + gl.arange(0, ROWS, layout=BY_ROW)
        low, high, center, beyond = keys_of(index, block.offset, call, CAUSAL, LIMITED)
        column_bias = (block.slope2 * columns.to(gl.float32))[None, :]
        largest = gl.full([ROWS], LOWEST, gl.float32, layout=BY_ROW)
        total = gl.full([ROWS], 0.0, gl.float32, layout=BY_ROW)
        values = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
        arrival(shared.query_pipe, 2 * blocks + half, 2)
        arrival(shared.key_pipe, tiles, STAGES)
        key = tile_of(shared.key, tiles, STAGES).permute((1, 0))
        products = warpgroup_mma(query, key, blank, use_acc=False, is_async=True)
        products = warpgroup_mma_wait(0, deps=(products,))
        release(shared.key_pipe, tiles, STAGES)
        weights, largest, total, decay = _soften(
            products, largest, total, low, high, center, column_bias, block,
            tile_start(0, block.left, block.top, BLOCK_N), call.scale2, CAUSAL, LIMITED, BLOCK_N, SCORES,
        )  # fmt: skip
        operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
        left = block.left
        count = block.count
        i = 1
        while i < count:
            if i == block.near:
                _report_reach(
                    half, reports, query, low, high, center, largest, total, shared, block, call, CAUSAL, BY_ROW
                )
                left, count = within_reach(reports, shared, block, BLOCK_N)
            tile = tiles + i
            arrival(shared.key_pipe, tile, STAGES)
            key = tile_of(shared.key, tile, STAGES).permute((1, 0))
            products = warpgroup_mma(query, key, blank, use_acc=False, is_async=True)
            arrival(shared.value_pipe, tile - 1, STAGES)
            values = warpgroup_mma(operand, tile_of(shared.value, tile - 1, STAGES), values, is_async=True)
            products = warpgroup_mma_wait(1, deps=(products,))
            release(shared.key_pipe, tile, STAGES)
            weights, largest, total, decay = _soften(
                products, largest, total, low, high, center, column_bias, block,
                tile_start(i, left, block.top, BLOCK_N), call.scale2, CAUSAL, LIMITED, BLOCK_N, SCORES,
            )  # fmt: skip
            arrival(shared.key_pipe, tile + 1, STAGES, pred=i + 1 < count)  # holds the exponentials in their place
            values, weights = warpgroup_mma_wait(0, deps=(values, weights))
            release(shared.value_pipe, tile - 1, STAGES)
            values = values * gl.convert_layout(decay, gl.SliceLayout(1, OUT))[:, None]
            operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
            i += 1
        release(shared.query_pipe, 2 * blocks + half, 2)
        tiles += count
        reports += gl.where(block.count > block.near, 1, 0)
        arrival(shared.value_pipe, tiles - 1, STAGES)
        values = warpgroup_mma(operand, tile_of(shared.value, tiles - 1, STAGES), values, is_async=True)
        values = warpgroup_mma_wait(0, deps=(values,))
        release(shared.value_pipe, tiles - 1, STAGES)

        empty = total == 0  # False for NaN, which must reach the output
        inverse = gl.where(empty, 0.0, 1 / gl.where(empty, 1.0, total))
        values = values * gl.convert_layout(inverse, gl.SliceLayout(1, OUT))[:, None]
        tma.store_wait(0)  # of the last block
        tile_of(results.tiles, half, 2).store(values.to(dtype))
        fence_async_shared()
        copy_out(results.out, [block.batch, block.head, block.first + half * ROWS, 0], results.tiles.index(half))
        row_log2 = gl.where(empty, float("-inf"), largest + gl.log2(total))
        offsets = block.row.to(gl.int64) * call.query_length + index
        inside = index < call.query_length
        gl.store(results.log2_sum + offsets, row_log2, mask=inside)
        gl.store(results.lse + offsets, (row_log2 - block.slope2 * beyond) * LN_2, mask=inside)
        ranges_begin = block.top - left * BLOCK_N
        ranges_end = block.end
        if not CAUSAL:
            ranges_end = gl.minimum(block.top + (count - left) * BLOCK_N, call.key_length)
        store_attended(
            results.ranges, block.row, block.first + half * ROWS, ranges_begin, ranges_end, call.query_length
        )
        work = received_work(shared.work, shared.work_pipe, blocks)
        blocks += 1
    tma.store_wait(0)


@gluon_kernel
def gluon_forward_kernel(
    query, key, value, slopes, query_start, norms, out, lse, log2_sum, ranges, counter,
    query_offset: tl.int64, window: tl.int64, scale: tl.float32, log2_tolerance: tl.float32,
    segment_length: tl.int32, num_heads: tl.int32, group_size: tl.int32, query_length: tl.int32,
    key_length: tl.int32, num_works: tl.int32, stride_start: tl.int64, stride_slope_b: tl.int64,
    stride_slope_h: tl.int64,
    CAUSAL: tl.constexpr, LIMITED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Bulk copies move tiles of ROWS queries and outputs, and of BLOCK_N keys and values."""
    gl.static_assert(STAGES >= 2, "a consumer holds tiles while it waits for the next keys")
    call = Call(
        query_start, slopes, None, norms, log2_tolerance, query_offset, window, scale * LOG2_E, segment_length,
        num_heads, group_size, query_length, key_length, stride_start, stride_slope_b, stride_slope_h, num_works,
        counter,
    )  # fmt: skip
    shared = Shared(
        make_tiles(query, ROWS, BLOCK_D, 2),
        None,
        None,
        make_tiles(key, BLOCK_N, BLOCK_D, STAGES),
        make_tiles(value, BLOCK_N, BLOCK_D, STAGES),
        make_numbers(2),
        make_numbers(4),
        make_numbers(4),
        make_pipe(2, 1),
        make_pipe(STAGES, 2),
        make_pipe(STAGES, 2),
        make_pipe(2, 2),
        make_pipe(2, 3, 2),
    )
    fence_async_shared()
    results = Results(out, lse, log2_sum, ranges, make_tiles(out, ROWS, BLOCK_D, 2))
    gl.warp_specialize(
        [
            (_consume, (0, results, shared, call, CAUSAL, LIMITED, BLOCK_D, BLOCK_N, STAGES)),
            (_consume, (1, results, shared, call, CAUSAL, LIMITED, BLOCK_D, BLOCK_N, STAGES)),
            (produce, (query, None, None, key, value, shared, call, CAUSAL, LIMITED, BLOCK_N, STAGES, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
