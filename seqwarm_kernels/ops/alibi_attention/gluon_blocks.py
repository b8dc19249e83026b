"""Blocks of queries of the Gluon kernels: which keys a block attends and in which order, its producer, its scores.

Programs stay on their multiprocessor and draw blocks from a counter, so that a producer copies the tiles of the next
block while the consumers finish the last one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_tiles import ROWS, arrival, copy_in, expect, release
from .schema import RANGE_BLOCK
from .triton_tiles import FAR, is_linear, opposite, slopes_of, visible_keys

_RANGE_BLOCK = gl.constexpr(RANGE_BLOCK)


class Call(NamedTuple):
    """What all programs read."""

    query_start: Any
    slopes: Any
    ranges: Any
    query_offset: Any
    window: Any
    scale2: Any
    segment_length: Any
    num_heads: Any
    group_size: Any
    query_length: Any
    key_length: Any
    stride_start: Any
    stride_slope_b: Any
    stride_slope_h: Any
    num_works: Any  # blocks of all heads
    counter: Any  # of blocks that were drawn, beyond the first of each program


class Shared(NamedTuple):
    """Tiles in shared memory, and their pipes. Slots of query, grad_out and out belong to one consumer each."""

    query: Any
    grad_out: Any  # None in forward, as out
    out: Any
    key: Any
    value: Any
    work: Any
    query_pipe: Any
    key_pipe: Any
    value_pipe: Any
    work_pipe: Any


class Block(NamedTuple):
    """Queries of a head that a program attends at a time."""

    batch: Any
    head: Any
    row: Any  # of the batch and head
    first: Any
    offset: Any
    slope2: Any
    top: Any  # tiles are visited from here to the left, then from here to the right
    left: Any
    count: Any  # of tiles, at least 1
    # Tiles in [full_begin, near_begin) and [near_end, full_end) are seen by every row, and their bias is linear.
    full_begin: Any
    near_begin: Any
    near_end: Any
    full_end: Any


@gluon.jit
def find_block(work, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_N: gl.constexpr):
    num_blocks = gl.cdiv(call.query_length, 2 * ROWS)
    # Longest first: late queries see most keys, and the last heads have the flattest slopes.
    first = (num_blocks - 1 - work % num_blocks) * 2 * ROWS
    head = call.num_heads - 1 - work // num_blocks % call.num_heads
    batch = work // num_blocks // call.num_heads
    row = batch * call.num_heads + head
    last = gl.minimum(first + 2 * ROWS, call.query_length) - 1
    offset = call.query_offset
    if call.query_start is not None:
        offset += gl.load(call.query_start + batch * call.stride_start)
    slope2, _ = slopes_of(call.slopes, 0, batch, head, call.stride_slope_b, call.stride_slope_h, None, False)
    _, high, first_center, _ = keys_of(first, offset, call, CAUSAL, LIMITED)
    low, _, last_center, _ = keys_of(last, offset, call, CAUSAL, LIMITED)
    begin, end = _attended(call.ranges, row, first, call.query_length)
    begin = begin // BLOCK_N * BLOCK_N
    near_begin = first_center // BLOCK_N * BLOCK_N
    near_end = gl.cdiv(last_center + 1, BLOCK_N) * BLOCK_N
    top = gl.cdiv(end, BLOCK_N) * BLOCK_N
    if not CAUSAL:
        top = gl.minimum(top, near_end)
    left = gl.maximum(top - begin, 0) // BLOCK_N
    count = gl.maximum(left + gl.cdiv(gl.maximum(end - top, 0), BLOCK_N), 1)
    linear = is_linear(slope2, gl.maximum(last_center - low, high - first_center).to(gl.float32), False)
    full_begin = gl.where(linear, low, near_begin)
    full_end = gl.where(linear, high, near_end)
    return Block(batch, head, row, first, offset, slope2, top, left, count, full_begin, near_begin, near_end, full_end)


@gluon.jit
def keys_of(index, offset, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr):
    """The keys that queries see: low, high, center, beyond (triton_tiles.py)."""
    first, last, position, _ = opposite(
        index, 0, None, None, 0, call.key_length, offset, call.segment_length, LIMITED, 0
    )
    return visible_keys(first, last, position, call.window, CAUSAL, LIMITED)


@gluon.jit
def tile_start(i, block, BLOCK_N: gl.constexpr):
    return gl.where(i < block.left, block.top - (i + 1) * BLOCK_N, block.top + (i - block.left) * BLOCK_N)


@gluon.jit
def make_works():
    """Shared memory for works that the producer draws."""
    return gl.allocate_shared_memory(gl.int32, [2, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def produce(
    query, grad_out, out, key, value, shared, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    work = gl.program_id(0)
    blocks = 0
    tiles = 0
    while work < call.num_works:
        block = find_block(work, call, CAUSAL, LIMITED, BLOCK_N)
        for half in gl.static_range(2):
            place = [block.batch, block.head, block.first + half * ROWS, 0]
            if grad_out is None:
                barrier = expect(shared.query_pipe, 2 * blocks + half, query.block_type.nbytes, 2)
            else:
                barrier = expect(shared.query_pipe, 2 * blocks + half, 3 * query.block_type.nbytes, 2)
                copy_in(grad_out, place, barrier, shared.grad_out.index(half))
                copy_in(out, place, barrier, shared.out.index(half))
            copy_in(query, place, barrier, shared.query.index(half))
        key_head = block.head // call.group_size
        for i in range(tiles, tiles + block.count):
            place = [block.batch, key_head, tile_start(i - tiles, block, BLOCK_N), 0]
            barrier = expect(shared.key_pipe, i, key.block_type.nbytes, K_STAGES)
            copy_in(key, place, barrier, shared.key.index(i % K_STAGES))
            barrier = expect(shared.value_pipe, i, value.block_type.nbytes, V_STAGES)
            copy_in(value, place, barrier, shared.value.index(i % V_STAGES))
        tiles += block.count
        work = draw_work(shared.work, shared.work_pipe, blocks, call.counter)
        blocks += 1


@gluon.jit
def draw_work(works, pipe, i, counter):
    """Draw the i-th work after a program's own, and tell the consumers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    work = gl.num_programs(0) + gl.atomic_add(counter, 1)
    mbarrier.wait(pipe.empty.index(i % 2), ((i // 2) & 1) ^ 1)
    works.index(i % 2).store(gl.full([1], work, gl.int32, layout=LAYOUT))
    mbarrier.arrive(pipe.full.index(i % 2), count=1)
    return work


@gluon.jit
def told_work(works, pipe, i):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    arrival(pipe, i, 2)
    work = gl.max(works.index(i % 2).load(LAYOUT), 0)
    release(pipe, i, 2)
    return work


@gluon.jit
def _attended(ranges, row, first, length):
    """The keys that the queries of a block attend, from the entries of `ranges` of its two consumers."""
    NEXT: gl.constexpr = 2 * (ROWS // _RANGE_BLOCK)
    entries = ranges + (row.to(gl.int64) * gl.cdiv(length, _RANGE_BLOCK) + first // _RANGE_BLOCK) * 2
    both = first + ROWS < length
    begin = gl.load(entries)
    end = gl.load(entries + 1)
    begin = gl.minimum(begin, gl.load(entries + NEXT, mask=both, other=FAR))
    end = gl.maximum(end, gl.load(entries + NEXT + 1, mask=both, other=0))
    return begin, end


@gluon.jit
def scores_of_tile(
    products, low, high, center, column_bias, block, start, scale2,
    CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Scores in base 2, and what is to be subtracted from those of a row.

    Where the bias is linear, it counts from the tile's first column, which shifts all scores of a row equally. Then
    each score costs one multiply-add."""
    if (start >= block.full_begin) & (start + BLOCK_N <= block.near_begin):
        scores = gl.fma(products, scale2, column_bias)
        shift = block.slope2 * (center - start).to(gl.float32)
    elif (not CAUSAL) & (start >= block.near_end) & (start + BLOCK_N <= block.full_end):
        scores = gl.fma(products, scale2, -column_bias)
        shift = block.slope2 * (start - center).to(gl.float32)
    else:
        columns = (start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES)))[None, :]
        distance = gl.abs(center[:, None] - columns).to(gl.float32)
        visible = columns < high[:, None]
        if LIMITED:
            visible = visible & (columns >= low[:, None])
        scores = gl.where(visible, gl.fma(products, scale2, -block.slope2 * distance), float("-inf"))
        shift = center.to(gl.float32) * 0
    return scores, shift
