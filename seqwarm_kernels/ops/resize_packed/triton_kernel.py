"""The kernel of `resize_packed`: every tensor of a packed batch, and its info, in one launch.

A new token finds its piece by bisection among the first tokens of all pieces, a small table that stays in the cache.
Programs: the tiles of each tensor, then the info of the pieces.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from ..resize_batch.triton_kernel import add_to_total, pointer_of
from ..triton_launch import kernel


class PackedEntry(NamedTuple):
    """One contiguous tensor, or several that are copied alike. A token is `units` items."""

    source: Any  # or a tuple
    out: Any  # or a tuple
    units: int


class PieceTable(NamedTuple):
    """The rows of `pieces`, in the order of schema.Pieces, and their number."""

    first: Any
    source: Any
    start: Any
    sequence: Any
    repeated: Any
    count: int


#: Values of schema.PackedKind for the kernel.
SEQUENCE = tl.constexpr(0)
LABEL = tl.constexpr(2)
POSITION = tl.constexpr(3)
INDEX = tl.constexpr(4)


@triton.jit
def entry_of(bundle, index, ITEM_BYTES: tl.constexpr):
    """One of the tensors that are copied alike."""
    source, out = pointer_of(bundle.source, index, ITEM_BYTES), pointer_of(bundle.out, index, ITEM_BYTES)
    return PackedEntry(source, out, bundle.units)


@triton.jit
def piece_of(token, table, widest_step):
    """The last piece that begins at the token or before it. Pieces without tokens come before it.

    `widest_step` is the largest power of two that is at most the number of pieces.
    """
    piece = token * 0
    step = widest_step
    while step > 0:
        later = piece + step
        begins = tl.load(table.first + later)  # beyond the first row of the table lie others
        piece = tl.where((later < table.count) & (begins <= token), later, piece)
        step = step // 2
    return piece


@triton.jit
def copy_tile(
    tile, entry, table, widest_step, tokens,
    KIND: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Write `GROUPS` groups of `WIDTH` items of one output. A group never spans two tokens."""
    token_groups = entry.units // WIDTH
    first = tile.to(tl.int64) * GROUPS
    within = (first % token_groups).to(tl.int32) + tl.arange(0, GROUPS)
    token = first // token_groups + within // token_groups
    written = token < tokens
    if KIND == SEQUENCE:
        source = tl.load(table.sequence + token, mask=written)
        filled = token < 0
    else:
        piece = piece_of(token, table, widest_step)
        begin = tl.load((table.start if KIND == POSITION else table.source) + piece, mask=written)
        slot = token - tl.load(table.first + piece, mask=written)
        source = begin + slot
        filled = token < 0
        if KIND == LABEL:
            filled = slot < tl.load(table.repeated + piece, mask=written)

    lanes = tl.arange(0, WIDTH)[None, :]
    unit = within % token_groups * WIDTH
    out_offset = tl.multiple_of((token * entry.units + unit)[:, None], [1, WIDTH]) + lanes
    out = entry.out + out_offset
    if KIND == INDEX:
        items = piece[:, None].to(out.dtype.element_ty)  # a group is one number
    else:
        source_offset = tl.multiple_of((source * entry.units + unit)[:, None], [1, WIDTH]) + lanes
        has_token = written & ~filled
        items = tl.load(entry.source + source_offset, mask=has_token[:, None], other=FILL)
    tl.store(out, items, mask=written[:, None])


@triton.jit
def write_info(tile, info, mask, mask_stride, table, tokens, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write lengths and position ids of `ROWS` pieces, and add their valid tokens to the total."""
    piece = tile * ROWS + tl.arange(0, ROWS)
    exists = piece < table.count
    first = tl.load(table.first + piece, mask=exists)
    end = tl.load(table.first + piece + 1, mask=piece + 1 < table.count, other=tokens)
    length = tl.where(exists, end - first, 0)[:, None]
    source = tl.load(table.source + piece, mask=exists)[:, None]
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, tl.max(tl.max(length, 1), 0), COLUMNS):
        slot = start + tl.arange(0, COLUMNS)[None, :]
        within = slot < length
        valid = within
        if mask is not None:
            valid &= tl.load(mask + (source + slot) * mask_stride, mask=within) != 0
        valid = valid.to(tl.int32)
        before = count[:, None] + tl.cumsum(valid, 1) - valid
        tl.store(info.position_ids + first[:, None] + slot, tl.where(valid != 0, before, 0).to(tl.int64), mask=within)
        count += tl.sum(valid, 1)
    tl.store(info.valid_lengths + piece, count, mask=exists)
    add_to_total(info, tl.sum(count.to(tl.int64), 0), tl.cdiv(table.count, ROWS))


@kernel
def resize_packed_kernel(
    bundles, info, mask, pieces, mask_stride: tl.int64, piece_count: tl.int32, widest_step: tl.int32, tokens: tl.int64,
    LAYOUTS: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`bundles` has a PackedEntry for tensors that are copied alike, `LAYOUTS` what `make_layout` returns for it."""
    source = pieces + piece_count
    start = source + piece_count
    sequence = start + piece_count
    table = PieceTable(pieces, source, start, sequence, sequence + piece_count, piece_count)
    tile = tl.program_id(0)
    for i in tl.static_range(len(LAYOUTS)):
        entry_tokens = piece_count.to(tl.int64) if LAYOUTS[i][0] == SEQUENCE else tokens
        tiles = tl.cdiv(entry_tokens * bundles[i].units // LAYOUTS[i][2], GROUPS)
        programs = tiles * len(bundles[i].source)
        if tile >= 0 and tile < programs:
            copy_tile(
                tile % tiles, entry_of(bundles[i], tile // tiles, LAYOUTS[i][1]), table, widest_step, entry_tokens,
                LAYOUTS[i][0], LAYOUTS[i][2], LAYOUTS[i][3], GROUPS,
            )  # fmt: skip
        tile -= programs
    if info is not None and tile >= 0:
        write_info(tile, info, mask, mask_stride, table, tokens, ROWS, COLUMNS)
