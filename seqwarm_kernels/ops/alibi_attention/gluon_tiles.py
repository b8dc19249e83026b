"""What the Gluon kernels for Hopper share: tiles in shared memory that a producer fills and two consumers read.

A program has three partitions: two consumers of four warps, each with ROWS rows of the program's block, and a producer
of one warp, which issues bulk copies. A pipe has two barriers for each slot of shared memory: `full` once a copy has
landed, `empty` once all consumers have read it. Tile i of a pipe is in slot i % SLOTS.

Gluon is experimental. What differs between versions of Triton is here and nowhere else.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from ..triton_launch import kernel

gluon_kernel = functools.partial(kernel, jit=gluon.jit)
copy_in = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
copy_out = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

#: Rows of a consumer: those of a matrix product of one warp group.
ROWS = gl.constexpr(64)
#: Registers of a consumer's thread, and of a producer's.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
LOWEST = gl.constexpr(-3.4028234663852886e38)  # finite, so that no row needs a check whether it has seen a key


class Pipe(NamedTuple):
    full: Any
    empty: Any


@gluon.jit
def make_pipe(SLOTS: gl.constexpr, CONSUMERS: gl.constexpr, PRODUCERS: gl.constexpr = 1):
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=PRODUCERS)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Pipe(full, empty)


@gluon.jit
def expect(pipe, i, bytes: gl.constexpr, SLOTS: gl.constexpr):
    """The barrier on which copies of `bytes` into the slot of tile i land, once the slot is empty."""
    mbarrier.wait(pipe.empty.index(i % SLOTS), ((i // SLOTS) & 1) ^ 1)
    barrier = pipe.full.index(i % SLOTS)
    mbarrier.expect(barrier, bytes)
    return barrier


@gluon.jit
def arrival(pipe, i, SLOTS: gl.constexpr, pred=True):
    """Wait until tile i has landed."""
    mbarrier.wait(pipe.full.index(i % SLOTS), (i // SLOTS) & 1, pred=pred)


@gluon.jit
def release(pipe, i, SLOTS: gl.constexpr):
    mbarrier.arrive(pipe.empty.index(i % SLOTS), count=1)


@gluon.jit
def release_full(pipe, i, SLOTS: gl.constexpr):
    """Of what was stored without a copy."""
    mbarrier.arrive(pipe.full.index(i % SLOTS), count=1)


@gluon.jit
def make_tiles(descriptor, TILE: gl.constexpr, BLOCK_D: gl.constexpr, SLOTS: gl.constexpr):
    return gl.allocate_shared_memory(descriptor.dtype, [SLOTS, 1, 1, TILE, BLOCK_D], descriptor.layout)


@gluon.jit
def tile_of(tiles, i, SLOTS: gl.constexpr):
    """(rows, dim) of tiles (SLOTS, 1, 1, rows, dim)."""
    return tiles.index(i % SLOTS).reshape([tiles.shape[3], tiles.shape[4]])


@gluon.constexpr_function
def product_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Of the result of a product with ROWS rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def row_layout(block_d: int) -> gl.BlockedLayout:
    """Of a tile of ROWS rows that is read from memory in blocks of 16 bytes."""
    threads = block_d // 8
    return gl.BlockedLayout([1, 8], [32 // threads, threads], [4, 1], [1, 0])
