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
from .triton_reach import NORM_BLOCK
from .triton_tiles import FAR, is_linear, opposite, slopes_of, visible_keys

_RANGE_BLOCK = gl.constexpr(RANGE_BLOCK)
_NORM_BLOCK = gl.constexpr(NORM_BLOCK)


class Call(NamedTuple):
    """What all programs read."""

    query_start: Any
    slopes: Any
    ranges: Any  # of the keys that forward attended; None in forward
    norms: Any  # of blocks of keys; None in backward
    log2_tolerance: Any  # −∞: no key is skipped
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
    begin: Any  # of the keys within reach of a consumer's queries; None in backward, as end and reach_pipe
    end: Any
    query_pipe: Any
    key_pipe: Any
    value_pipe: Any
    work_pipe: Any
    reach_pipe: Any


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
    near: Any  # tiles that are attended before the reach is known
    begin: Any
    end: Any
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
    begin, high, first_center, _ = keys_of(first, offset, call, CAUSAL, LIMITED)
    low, end, last_center, _ = keys_of(last, offset, call, CAUSAL, LIMITED)
    if call.ranges is not None:
        begin, end = _attended(call.ranges, row, first, call.query_length)
    near_begin = first_center // BLOCK_N * BLOCK_N
    near_end = gl.cdiv(last_center + 1, BLOCK_N) * BLOCK_N
    top = gl.cdiv(end, BLOCK_N) * BLOCK_N
    if not CAUSAL:
        top = gl.minimum(top, near_end)
    left, right = tiles_within(begin, end, top, BLOCK_N)
    count = gl.maximum(left + right, 1)
    near = gl.maximum((top - near_begin) // BLOCK_N, 1)
    if call.log2_tolerance == float("-inf"):
        near = count
    linear = is_linear(slope2, gl.maximum(last_center - low, high - first_center).to(gl.float32), False)
    full_begin = gl.where(linear, low, near_begin)
    full_end = gl.where(linear, high, near_end)
    return Block(
        batch, head, row, first, offset, slope2, top, left, count, near, begin, end, full_begin, near_begin, near_end,
        full_end,
    )  # fmt: skip


@gluon.jit
def tiles_within(begin, end, top, BLOCK_N: gl.constexpr):
    """The number of tiles of [begin, end) left and right of `top`."""
    left = gl.maximum(top - begin // BLOCK_N * BLOCK_N, 0) // BLOCK_N
    return left, gl.cdiv(gl.maximum(end - top, 0), BLOCK_N)


@gluon.jit
def within_reach(reports, shared, block, BLOCK_N: gl.constexpr):
    """The number of tiles left of `top` and of all tiles, once both consumers have reported how far they reach. The
    tile after the near ones counts in any case: it is copied before."""
    arrival(shared.reach_pipe, reports, 2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = 2 * (reports % 2)
    begin = gl.minimum(scalar_of(shared.begin, slot, LAYOUT), scalar_of(shared.begin, slot + 1, LAYOUT))
    end = gl.maximum(scalar_of(shared.end, slot, LAYOUT), scalar_of(shared.end, slot + 1, LAYOUT))
    left, right = tiles_within(begin, end, block.top, BLOCK_N)
    left = gl.maximum(left, gl.minimum(block.left, block.near + 1))
    return left, gl.maximum(left + right, block.near + 1)


@gluon.jit
def scalar_of(numbers, slot, LAYOUT: gl.constexpr):
    return gl.max(numbers.index(slot).load(LAYOUT), 0)


@gluon.jit
def keys_of(index, offset, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr):
    """The keys that queries see: low, high, center, beyond (triton_tiles.py)."""
    first, last, position, _ = opposite(
        index, 0, None, None, 0, call.key_length, offset, call.segment_length, LIMITED, 0
    )
    return visible_keys(first, last, position, call.window, CAUSAL, LIMITED)


@gluon.jit
def tile_start(i, left, top, BLOCK_N: gl.constexpr):
    return gl.where(i < left, top - (i + 1) * BLOCK_N, top + (i - left) * BLOCK_N)


@gluon.jit
def make_numbers(SLOTS: gl.constexpr):
    """Shared memory for int32 that partitions tell one another."""
    return gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _copy_tiles(
    begin, end, left, tiles, key, value, block, shared, call, BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
):  # fmt: skip
    key_head = block.head // call.group_size
    for i in range(begin, end):
        place = [block.batch, key_head, tile_start(i, left, block.top, BLOCK_N), 0]
        barrier = expect(shared.key_pipe, tiles + i, key.block_type.nbytes, K_STAGES)
        copy_in(key, place, barrier, shared.key.index((tiles + i) % K_STAGES))
        barrier = expect(shared.value_pipe, tiles + i, value.block_type.nbytes, V_STAGES)
        copy_in(value, place, barrier, shared.value.index((tiles + i) % V_STAGES))


@gluon.jit
def produce(
    query, grad_out, out, key, value, shared, call, CAUSAL: gl.constexpr, LIMITED: gl.constexpr,
    BLOCK_N: gl.constexpr, K_STAGES: gl.constexpr, V_STAGES: gl.constexpr,
):  # fmt: skip
    work = gl.program_id(0)
    blocks = 0
    tiles = 0
    reports = 0
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
        left = block.left
        count = block.count
        first_tiles = gl.minimum(count, block.near + 1)
        _copy_tiles(0, first_tiles, left, tiles, key, value, block, shared, call, BLOCK_N, K_STAGES, V_STAGES)
        if shared.reach_pipe is not None:
            if count > block.near:
                left, count = within_reach(reports, shared, block, BLOCK_N)
                reports += 1
        _copy_tiles(first_tiles, count, left, tiles, key, value, block, shared, call, BLOCK_N, K_STAGES, V_STAGES)
        tiles += count
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
def received_work(works, pipe, i):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    arrival(pipe, i, 2)
    work = scalar_of(works, i % 2, LAYOUT)
    release(pipe, i, 2)
    return work


@gluon.jit
def _attended(ranges, row, first, length):
    """The keys that the queries of a block attend."""
    entries = ranges + (row.to(gl.int64) * gl.cdiv(length, _RANGE_BLOCK) + first // _RANGE_BLOCK) * 2
    begin = gl.load(entries)
    end = gl.load(entries + 1)
    for entry in gl.static_range(1, 2 * ROWS // _RANGE_BLOCK):
        inside = first + entry * _RANGE_BLOCK < length
        begin = gl.minimum(begin, gl.load(entries + 2 * entry, mask=inside, other=FAR))
        end = gl.maximum(end, gl.load(entries + 2 * entry + 1, mask=inside, other=0))
    return begin, end


@gluon.jit
def scores_of_tile(
    products, low, high, center, column_bias, block, start, scale2,
    CAUSAL: gl.constexpr, LIMITED: gl.constexpr, BLOCK_N: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """Scores in base 2, and what is to be subtracted from those of a row.

    Where the bias is linear, it counts from the tile's first column, which shifts all scores of a row equally. Then
    each score costs one multiply-add."""
    left = (start >= block.full_begin) & (start + BLOCK_N <= block.near_begin)
    right = (start >= block.near_end) & (start + BLOCK_N <= block.full_end)
    sign = 1.0 if CAUSAL else gl.where(left, 1.0, -1.0)  # a branch for each side would need more registers
    linear = left if CAUSAL else left | right
    if linear:
        scores = gl.fma(products, scale2, column_bias if CAUSAL else sign * column_bias)
        shift = sign * block.slope2 * (center - start).to(gl.float32)
    else:
        columns = (start + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, SCORES)))[None, :]
        distance = gl.abs(center[:, None] - columns).to(gl.float32)
        visible = columns < high[:, None]
        if LIMITED:
            visible = visible & (columns >= low[:, None])
        scores = gl.where(visible, gl.fma(products, scale2, -block.slope2 * distance), float("-inf"))
        shift = center.to(gl.float32) * 0
    return scores, shift


@gluon.jit
def store_attended(ranges, row, first, begin, end, length):
    for entry in gl.static_range(ROWS // _RANGE_BLOCK):
        place = ranges + (row.to(gl.int64) * gl.cdiv(length, _RANGE_BLOCK) + first // _RANGE_BLOCK + entry) * 2
        inside = first + entry * _RANGE_BLOCK < length
        gl.store(place, begin, mask=inside)
        gl.store(place + 1, end, mask=inside)


@gluon.jit
def largest_norm(norms, row, begin, end, length):
    """As in triton_reach.py."""
    CHUNK: gl.constexpr = 128
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    base = norms + row.to(gl.int64) * gl.cdiv(length, _NORM_BLOCK)
    largest = 0.0
    end_block = gl.where(begin < end, gl.cdiv(end, _NORM_BLOCK), 0)
    for first in range(begin // _NORM_BLOCK, end_block, CHUNK):
        blocks = first + gl.arange(0, CHUNK, layout=LAYOUT)
        squares = gl.load(base + blocks, mask=blocks < end_block, other=0.0)
        largest = gl.maximum(largest, gl.max(squares, 0))
    return gl.sqrt(largest)
