"""Backward, first kernel, if keys are skipped: the queries that attended each tile of keys."""

from __future__ import annotations

import triton.language as tl

from ..triton_launch import kernel
from .schema import RANGE_BLOCK
from .triton_tiles import FAR

#: Tiles of keys of one program, and entries of `ranges` that it reads at a time.
RANGE_TILES, RANGE_CHUNK = 16, 128

_RANGE_BLOCK = tl.constexpr(RANGE_BLOCK)


@kernel
def backward_ranges_kernel(
    ranges,
    key_ranges,  # (rows, tiles of keys, 2) int32: the first query, and the end of the last block of queries
    counters,  # None, or two int32, set to 0
    query_length: tl.int32,
    key_length: tl.int32,
    BLOCK_N: tl.constexpr,
    TILES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    num_tiles = tl.cdiv(key_length, BLOCK_N)
    programs_of_row = tl.cdiv(num_tiles, TILES)
    program = tl.program_id(0)
    if counters is not None:
        if program == 0:
            tl.store(counters + tl.arange(0, 2), 0)
    row = program // programs_of_row
    tile = program % programs_of_row * TILES + tl.arange(0, TILES)
    begin = tile * BLOCK_N
    end = tl.minimum(begin + BLOCK_N, key_length)
    num_ranges = tl.cdiv(query_length, _RANGE_BLOCK)
    ranges += row.to(tl.int64) * num_ranges * 2
    lowest = tl.full((TILES,), FAR, tl.int32)
    highest = tl.zeros((TILES,), tl.int32)
    for first in range(0, num_ranges, CHUNK):
        blocks = first + tl.arange(0, CHUNK)
        present = blocks < num_ranges
        attended_begin = tl.load(ranges + blocks * 2, mask=present)[:, None]
        attended_end = tl.load(ranges + blocks * 2 + 1, mask=present)[:, None]
        hit = present[:, None] & (attended_begin < end[None, :]) & (attended_end > begin[None, :])
        lowest = tl.minimum(lowest, tl.min(tl.where(hit, (blocks * _RANGE_BLOCK)[:, None], FAR), 0))
        highest = tl.maximum(highest, tl.max(tl.where(hit, ((blocks + 1) * _RANGE_BLOCK)[:, None], 0), 0))
    entries = key_ranges + (row.to(tl.int64) * num_tiles + tile) * 2
    tl.store(entries, lowest, mask=tile < num_tiles)
    tl.store(entries + 1, highest, mask=tile < num_tiles)
