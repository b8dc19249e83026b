"""Gradients of keys and values for Hopper in Gluon. Each consumer has ROWS keys, and loops over queries that see them.

triton_backward_query.py has the formulas. Tiles are transposed here: rows are keys, columns queries. The order of a
consumer's iteration:

    start scores and V · dOᵀ; wait for the scores; exponentials; wait; start dV; start dK; wait for both
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

from .gluon_blocks import draw_work, make_numbers, received_work
from .gluon_tiles import (
    CONSUMER_REGISTERS,
    PRODUCER_REGISTERS,
    ROWS,
    arrival,
    copy_in,
    copy_out,
    expect,
    gluon_kernel,
    make_pipe,
    make_tiles,
    product_layout,
    release,
    tile_of,
)
from .triton_tiles import LOG2_E, is_linear, opposite, slopes_of, visible_queries


class Call(NamedTuple):
    """What all programs read."""

    slopes: Any
    key_ranges: Any  # the first and last query that attended each block of keys
    query_offset: Any
    window: Any
    scale2: Any
    segment_length: Any
    num_heads: Any
    group_size: Any
    query_length: Any
    key_length: Any
    stride_slope_b: Any
    stride_slope_h: Any
    num_works: Any  # blocks of all key heads
    counter: Any  # of blocks that were drawn, beyond the first of each program


class Shared(NamedTuple):
    """Tiles in shared memory, and their pipes. Slots of key and value belong to one consumer each."""

    key: Any
    value: Any
    query: Any
    grad_out: Any
    lse2: Any
    delta: Any
    work: Any
    key_pipe: Any
    query_pipe: Any  # query and lse2
    grad_pipe: Any  # grad_out and delta
    work_pipe: Any


class Block(NamedTuple):
    """Keys of a head that a program handles at a time."""

    batch: Any
    key_head: Any
    first: Any
    # Tiles of queries in [full_begin, near_begin) and [near_end, full_end) see every key.
    full_begin: Any
    near_begin: Any
    near_end: Any
    full_end: Any
    farthest: Any  # distance in these tiles


class Member(NamedTuple):
    """The queries of one of the heads that share a block of keys."""

    head: Any
    slope2: Any
    linear: Any  # whether tiles that see every key compute linear biases
    begin: Any
    count: Any  # of tiles


@gluon.jit
def _queries_of(index, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr):
    """The queries that see keys: low, high, and the one at distance zero."""
    first, last, zero, _ = opposite(
        index, 0, None, None, 0, call.query_length, -call.query_offset, call.segment_length, LIMITED, 0
    )
    return visible_queries(first, last, zero, 0, call.window, CAUSAL, LIMITED)


@gluon.jit
def _find_block(work, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_M: gl.constexpr):
    num_blocks = gl.cdiv(call.key_length, 2 * ROWS)
    num_key_heads = call.num_heads // call.group_size
    first = work % num_blocks * 2 * ROWS  # longest first: most queries see the early keys
    key_head = num_key_heads - 1 - work // num_blocks % num_key_heads
    batch = work // num_blocks // num_key_heads
    last = gl.minimum(first + 2 * ROWS, call.key_length) - 1
    _, full_end, first_center = _queries_of(first, call, CAUSAL, LIMITED)
    full_begin, _, last_center = _queries_of(last, call, CAUSAL, LIMITED)
    near_begin = first_center // BLOCK_M * BLOCK_M
    near_end = gl.cdiv(last_center + 1, BLOCK_M) * BLOCK_M
    farthest = gl.maximum(last_center - full_begin, full_end - first_center).to(gl.float32)
    return Block(batch, key_head, first, full_begin, near_begin, near_end, full_end, farthest)


@gluon.jit
def _find_member(member, block, call, BLOCK_M: gl.constexpr):
    head = block.key_head * call.group_size + member
    slope2, _ = slopes_of(call.slopes, 0, block.batch, head, call.stride_slope_b, call.stride_slope_h, None, False)
    num_blocks = gl.cdiv(call.key_length, 2 * ROWS)
    row = (block.batch * call.num_heads + head).to(gl.int64)
    entry = call.key_ranges + (row * num_blocks + block.first // (2 * ROWS)) * 2
    begin = gl.load(entry) // BLOCK_M * BLOCK_M
    end = gl.minimum(gl.load(entry + 1), call.query_length)
    count = gl.cdiv(gl.maximum(end - begin, 0), BLOCK_M)
    return Member(head, slope2, is_linear(slope2, block.farthest, False), begin, count)


@gluon.jit
def _produce(
    query, grad_out, lse2, delta, key, value, shared, call,
    CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    work = gl.program_id(0)
    blocks = 0
    tiles = 0
    while work < call.num_works:
        block = _find_block(work, call, CAUSAL, LIMITED, BLOCK_M)
        for half in gl.static_range(2):
            place = [block.batch, block.key_head, block.first + half * ROWS, 0]
            barrier = expect(shared.key_pipe, 2 * blocks + half, 2 * key.block_type.nbytes, 2)
            copy_in(key, place, barrier, shared.key.index(half))
            copy_in(value, place, barrier, shared.value.index(half))
        for group_member in range(call.group_size):
            member = _find_member(group_member, block, call, BLOCK_M)
            row = block.batch * call.num_heads + member.head
            for i in range(tiles, tiles + member.count):
                start = member.begin + (i - tiles) * BLOCK_M
                barrier = expect(shared.query_pipe, i, query.block_type.nbytes + lse2.block_type.nbytes, STAGES)
                copy_in(query, [block.batch, member.head, start, 0], barrier, shared.query.index(i % STAGES))
                copy_in(lse2, [row, start], barrier, shared.lse2.index(i % STAGES))
                barrier = expect(shared.grad_pipe, i, grad_out.block_type.nbytes + delta.block_type.nbytes, STAGES)
                copy_in(grad_out, [block.batch, member.head, start, 0], barrier, shared.grad_out.index(i % STAGES))
                copy_in(delta, [row, start], barrier, shared.delta.index(i % STAGES))
            tiles += member.count
        work = draw_work(shared.work, shared.work_pipe, blocks, call.counter)
        blocks += 1


@gluon.jit
def _weights(
    products, lse2, low, high, center, columns, block, member, start, scale2,
    CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_M: gl.constexpr,
):  # fmt: skip
    queries = start + columns
    after = start >= block.near_end
    full = (
        (start >= block.full_begin)
        & (after | (start + BLOCK_M <= block.near_begin))
        & (start + BLOCK_M <= block.full_end)
    )
    if member.linear & full:
        theirs = member.slope2 * (queries - block.first).to(gl.float32)  # recomputed: in registers it would spill
        shift = member.slope2 * (block.first - center).to(gl.float32)
        if not (CAUSAL | after):
            theirs = -theirs
            shift = -shift
        scores = gl.fma(products, scale2, -(lse2 + theirs)[None, :])
    else:
        visible = (queries[None, :] >= low[:, None]) & (queries[None, :] < high[:, None])
        distance = queries[None, :] - center[:, None]
        if not CAUSAL:
            distance = gl.abs(distance)
        scores = gl.fma(products, scale2, -member.slope2 * distance.to(gl.float32)) - lse2[None, :]
        scores = gl.where(visible, scores, float("-inf"))
        shift = center.to(gl.float32) * 0
    return gl.exp2(scores - shift[:, None])


@gluon.jit
def _consume(
    half, grad_key, grad_value, key_out, value_out, shared, call, scale,
    CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    SCORES: gl.constexpr = product_layout(BLOCK_M)
    OUT: gl.constexpr = product_layout(BLOCK_D)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=OUT, k_width=2)
    BY_QUERY: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = grad_key.dtype
    columns = gl.arange(0, BLOCK_M, layout=BY_QUERY)
    blank = gl.zeros([ROWS, BLOCK_M], gl.float32, layout=SCORES)
    key = tile_of(shared.key, half, 2)
    value = tile_of(shared.value, half, 2)
    work = gl.program_id(0)
    blocks = 0
    tiles = 0
    while work < call.num_works:
        block = _find_block(work, call, CAUSAL, LIMITED, BLOCK_M)
        index = block.first + half * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
        low, high, center = _queries_of(index, call, CAUSAL, LIMITED)
        to_key = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
        to_value = gl.zeros([ROWS, BLOCK_D], gl.float32, layout=OUT)
        arrival(shared.key_pipe, 2 * blocks + half, 2)
        for group_member in range(call.group_size):
            member = _find_member(group_member, block, call, BLOCK_M)
            end = tiles + member.count
            for i in range(tiles, end):
                start = member.begin + (i - tiles) * BLOCK_M
                query = tile_of(shared.query, i, STAGES)
                grad_out = tile_of(shared.grad_out, i, STAGES)
                arrival(shared.query_pipe, i, STAGES)
                products = warpgroup_mma(key, query.permute((1, 0)), blank, use_acc=False, is_async=True)
                arrival(shared.grad_pipe, i, STAGES)
                grad_weights = warpgroup_mma(value, grad_out.permute((1, 0)), blank, use_acc=False, is_async=True)
                lse2 = shared.lse2.index(i % STAGES).reshape([BLOCK_M]).load(BY_QUERY)
                products = warpgroup_mma_wait(1, deps=(products,))
                weights = _weights(
                    products, lse2, low, high, center, columns, block, member, start, call.scale2,
                    CAUSAL, LIMITED, BLOCK_M,
                )  # fmt: skip
                operand = gl.convert_layout(weights.to(dtype), WEIGHTS)
                delta = shared.delta.index(i % STAGES).reshape([BLOCK_M]).load(BY_QUERY)
                arrival(shared.query_pipe, i + 1, STAGES, pred=i + 1 < end)  # holds the exponentials in their place
                grad_weights, weights = warpgroup_mma_wait(0, deps=(grad_weights, weights))
                to_value = warpgroup_mma(operand, grad_out, to_value, is_async=True)
                grad_scores = weights * (grad_weights - delta[None, :])
                to_key = warpgroup_mma(gl.convert_layout(grad_scores.to(dtype), WEIGHTS), query, to_key, is_async=True)
                to_value = warpgroup_mma_wait(1, deps=(to_value,))
                release(shared.grad_pipe, i, STAGES)
                to_key = warpgroup_mma_wait(0, deps=(to_key,))
                release(shared.query_pipe, i, STAGES)
            tiles = end
        release(shared.key_pipe, 2 * blocks + half, 2)

        tma.store_wait(0)  # of the last block
        tile_of(key_out, half, 2).store((to_key * scale).to(dtype))
        tile_of(value_out, half, 2).store(to_value.to(dtype))
        fence_async_shared()
        place = [block.batch, block.key_head, block.first + half * ROWS, 0]
        copy_out(grad_key, place, key_out.index(half))
        copy_out(grad_value, place, value_out.index(half))
        work = received_work(shared.work, shared.work_pipe, blocks)
        blocks += 1
    tma.store_wait(0)


@gluon_kernel
def gluon_backward_key_kernel(
    query, grad_out, lse2, delta, key, value, slopes, key_ranges, grad_key, grad_value, counter,
    query_offset: tl.int64, window: tl.int64, scale: tl.float32, segment_length: tl.int32, num_heads: tl.int32,
    group_size: tl.int32, query_length: tl.int32, key_length: tl.int32, num_works: tl.int32,
    stride_slope_b: tl.int64, stride_slope_h: tl.int64,
    CAUSAL: tl.constexpr, LIMITED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Computes grad_key and grad_value, summed over the query heads that share a key head.

    Bulk copies move tiles of ROWS keys, values and their gradients, and of BLOCK_M queries."""
    gl.static_assert(STAGES >= 2, "a consumer holds tiles while it waits for the next queries")
    call = Call(
        slopes, key_ranges, query_offset, window, scale * LOG2_E, segment_length, num_heads, group_size,
        query_length, key_length, stride_slope_b, stride_slope_h, num_works, counter,
    )  # fmt: skip
    shared = Shared(
        make_tiles(key, ROWS, BLOCK_D, 2),
        make_tiles(value, ROWS, BLOCK_D, 2),
        make_tiles(query, BLOCK_M, BLOCK_D, STAGES),
        make_tiles(grad_out, BLOCK_M, BLOCK_D, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta.layout),
        make_numbers(2),
        make_pipe(2, 1),
        make_pipe(STAGES, 2),
        make_pipe(STAGES, 2),
        make_pipe(2, 2),
    )
    fence_async_shared()
    key_out = make_tiles(grad_key, ROWS, BLOCK_D, 2)
    value_out = make_tiles(grad_value, ROWS, BLOCK_D, 2)
    gl.warp_specialize(
        [
            (_consume, (0, grad_key, grad_value, key_out, value_out, shared, call, scale, CAUSAL, LIMITED, BLOCK_D, BLOCK_M, STAGES)),  # noqa: E501
            (_consume, (1, grad_key, grad_value, key_out, value_out, shared, call, scale, CAUSAL, LIMITED, BLOCK_D, BLOCK_M, STAGES)),  # noqa: E501
            (_produce, (query, grad_out, lse2, delta, key, value, shared, call, CAUSAL, LIMITED, BLOCK_M, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
