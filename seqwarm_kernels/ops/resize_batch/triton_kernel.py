"""The kernel of `resize_batch`: every tensor of a batch, and its info, in one launch.

All rules are the same copy, up to two details: each source row yields a *line* of tokens, and the concatenated lines
are the new batch. A line is the first L tokens of the row (truncate), its first ⌊S/L⌋·L (reshape_drop), all S
(flatten), or ⌈S/L⌋·L. In the last case, slots beyond the row are filled (reshape_pad), or the last new row holds the
row's last L tokens (reshape_overlap). So every output is written from its first to its last element, in blocks of 16
bytes where the tensor allows it.

The details: truncate_valid and truncate_keep_last cut a row from its first valid token on, and the latter may take
another token last.

Code is compiled once for all tensors that are copied alike: they are one Entry, with tuples of sources and outputs. A
program takes its pointers from the tuples.

Programs: the tiles of each tensor, then the info of the new rows, then, under these two rules, one program for each
row, which writes what the tiles leave out: a row that begins with masked tokens, or the last slot.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from ..triton_launch import kernel


class ResizePlan(NamedTuple):
    """How lines are cut into new rows. Lengths are in tokens."""

    tokens: int  # in the new batch
    line: int
    source_length: int
    new_length: int
    last_start: int  # position in a line of its last new row
    moved_by: int  # under reshape_overlap, how far back the tokens of the last new row are


class Entry(NamedTuple):
    """One tensor, with its features as one dimension, or several that are copied alike. Strides are in items."""

    source: Any  # or a tuple
    out: Any  # or a tuple
    row_stride: int
    position_stride: int
    unit_stride: int
    units: int


class Info(NamedTuple):
    valid_lengths: Tensor
    position_ids: Tensor
    num_valid_tokens: Tensor
    running_total: Tensor  # zero before and after the launch


#: Values of schema.Kind for the kernel.
ROW = tl.constexpr(0)
LABEL = tl.constexpr(2)
SQUARE = tl.constexpr(3)

#: The running total also counts the programs that added to it, in units larger than any number of tokens.
TICKET = tl.constexpr(2**33)


# Device functions return once, at their end, since Triton also compiles returns that are never reached.


@triton.jit
def as_bits(pointer, ITEM_BYTES: tl.constexpr):
    """The pointer as one to integers of the same size: every dtype is copied as integers."""
    if ITEM_BYTES == 1:
        bits = pointer.to(tl.pointer_type(tl.int8))
    elif ITEM_BYTES == 2:
        bits = pointer.to(tl.pointer_type(tl.int16))
    elif ITEM_BYTES == 4:
        bits = pointer.to(tl.pointer_type(tl.int32))
    else:
        bits = pointer.to(tl.pointer_type(tl.int64))
    return bits


@triton.jit
def pointer_of(tensors, index, ITEM_BYTES: tl.constexpr):
    """The pointer to one tensor of a tuple, as bits."""
    pointer = as_bits(tensors[0], ITEM_BYTES)
    for i in tl.static_range(1, len(tensors)):
        pointer = tl.where(index == i, as_bits(tensors[i], ITEM_BYTES), pointer)
    return pointer


@triton.jit
def entry_of(bundle, index, ITEM_BYTES: tl.constexpr):
    """One of the tensors that are copied alike."""
    source, out = pointer_of(bundle.source, index, ITEM_BYTES), pointer_of(bundle.out, index, ITEM_BYTES)
    return Entry(source, out, bundle.row_stride, bundle.position_stride, bundle.unit_stride, bundle.units)


@triton.jit
def source_position(position, plan, MOVES: tl.constexpr):
    """The source position of the token at `position` of a line, and whether an earlier new row holds the token."""
    if MOVES:
        moved = position >= plan.last_start
        source = tl.where(moved, position - plan.moved_by, position)
        repeated = moved & (source < plan.last_start)
    else:
        source = position
        repeated = position < 0
    return source, repeated


@triton.jit
def copy_tile(
    tile, entry, plan, KIND: tl.constexpr, WIDTH: tl.constexpr, FILL: tl.constexpr, mask, stride_row,
    PADS: tl.constexpr, MOVES: tl.constexpr, SKIPS_PADDING: tl.constexpr, KEEPS_LAST: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Write `GROUPS` groups of `WIDTH` items of one output."""
    line_groups = plan.line * entry.units // WIDTH
    first = tile.to(tl.int64) * GROUPS
    within = (first % line_groups).to(tl.int32) + tl.arange(0, GROUPS)
    row = first // line_groups + within // line_groups
    item = within % line_groups * WIDTH
    position = item // entry.units
    unit = item % entry.units

    group = first + tl.arange(0, GROUPS)
    written = group < plan.tokens.to(tl.int64) * entry.units // WIDTH
    position, repeated = source_position(position, plan, MOVES and KIND != ROW)
    has_token = written
    if PADS:
        has_token &= position < plan.source_length
    if KIND == LABEL:
        has_token &= ~repeated
    if KEEPS_LAST and KIND != ROW:
        written &= position != plan.new_length - 1
        if KIND == SQUARE:
            written &= unit != plan.new_length - 1
        has_token &= written

    offset = row * entry.row_stride + position.to(tl.int64) * entry.position_stride
    offset += unit.to(tl.int64) * entry.unit_stride
    lanes = tl.arange(0, WIDTH)[None, :]
    source_offset = tl.multiple_of(offset[:, None], [1, WIDTH]) + lanes
    out_offset = (group * WIDTH)[:, None] + lanes
    items = tl.load(entry.source + source_offset, mask=has_token[:, None], other=FILL)
    if SKIPS_PADDING and KIND != ROW:  # after the items, which need not wait for it
        written &= nonzero(mask + row * stride_row, written)
    tl.store(entry.out + out_offset, items, mask=written[:, None])


@triton.jit
def nonzero(pointers, within):
    return (tl.load(pointers, mask=within) != 0) & within


@triton.jit
def is_valid(mask, row, position, within, stride_row, stride_position):
    """The attention mask where `within`. Without a mask every token is valid."""
    valid = within
    if mask is not None:
        valid = nonzero(mask + row.to(tl.int64) * stride_row + position.to(tl.int64) * stride_position, within)
    return valid


@triton.jit
def first_kept_position(row, is_row, mask, stride_row, stride_position, plan, COLUMNS: tl.constexpr):
    """Of rows: the first valid position, or an earlier one where fewer than new_length tokens follow. 0 without one."""
    begins_masked = is_row & ~nonzero(mask + row * stride_row, is_row)
    unknown = plan.source_length
    first = tl.where(begins_masked, unknown, 0)
    start = 0
    while (start < plan.source_length) & (tl.max(first, 0) == unknown):
        position = start + tl.arange(0, COLUMNS)[None, :]
        within = begins_masked[:, None] & (position < plan.source_length)
        valid = is_valid(mask, row[:, None], position, within, stride_row, stride_position)
        first = tl.minimum(first, tl.min(tl.where(valid, position, unknown), 1))
        start += COLUMNS
    return tl.minimum(tl.where(first == unknown, 0, first), plan.source_length - plan.new_length)


@triton.jit
def write_info(
    tile, info, mask, stride_row, stride_position, new_rows, plan, PADS: tl.constexpr, MOVES: tl.constexpr,
    SKIPS_PADDING: tl.constexpr, KEEPS_LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write lengths and position ids of `ROWS` new rows, and add their valid tokens to the total."""
    new_row = tile * ROWS + tl.arange(0, ROWS)
    first = new_row.to(tl.int64) * plan.new_length
    row = first // plan.line
    first_position = (first % plan.line).to(tl.int32)[:, None]
    is_row = new_row < new_rows
    last_slot = plan.new_length - 1
    if SKIPS_PADDING:
        # a narrower tile, since the wide one would take 128 registers instead of 72
        kept_from = first_kept_position(row, is_row, mask, stride_row, stride_position, plan, COLUMNS // 4)[:, None]

    row, is_row = row[:, None], is_row[:, None]
    count = tl.zeros((ROWS,), tl.int32)
    for start in range(0, plan.new_length, COLUMNS):
        slot = start + tl.arange(0, COLUMNS)[None, :]
        position = first_position + slot
        beyond = position >= plan.line  # a new row of flatten may reach into the next line, at most one
        position = tl.where(beyond, position - plan.line, position)
        position = source_position(position, plan, MOVES)[0]
        if SKIPS_PADDING:
            position += kept_from
        within = is_row & (slot < plan.new_length)
        if PADS:
            has_token = within & (position < plan.source_length)
        else:
            has_token = within
        valid = is_valid(mask, row + beyond.to(tl.int64), position, has_token, stride_row, stride_position)
        if KEEPS_LAST:
            valid &= slot < last_slot
        valid = valid.to(tl.int32)
        before = count[:, None] + tl.cumsum(valid, 1) - valid
        tl.store(info.position_ids + first[:, None] + slot, tl.where(valid != 0, before, 0).to(tl.int64), mask=within)
        count += tl.sum(valid, 1)
    if KEEPS_LAST:
        any_valid = tl.zeros((ROWS,), tl.int32)
        for start in range(last_slot, plan.source_length, COLUMNS):
            position = start + tl.arange(0, COLUMNS)[None, :]
            within = is_row & (position >= kept_from + last_slot) & (position < plan.source_length)
            valid = is_valid(mask, row, position, within, stride_row, stride_position)
            any_valid = tl.maximum(any_valid, tl.max(valid.to(tl.int32), 1))
        tl.store(info.position_ids + first + last_slot, (any_valid * count).to(tl.int64), mask=new_row < new_rows)
        count += any_valid
    tl.store(info.valid_lengths + new_row, count, mask=new_row < new_rows)

    add_to_total(info, tl.sum(count.to(tl.int64), 0), tl.cdiv(new_rows, ROWS))


@triton.jit
def add_to_total(info, added, programs):
    """Add to the number of valid tokens. The last program knows it, and resets the running total to zero."""
    before = tl.atomic_add(info.running_total, added + TICKET)
    if before // TICKET == programs - 1:
        tl.store(info.num_valid_tokens, before % TICKET + added)
        tl.store(info.running_total, tl.zeros((), tl.int64))


@triton.jit
def last_kept_position(row, first, mask, stride_row, stride_position, plan, COLUMNS: tl.constexpr):
    """The last valid position of a row if it is cut, else the end of the new_length tokens from `first` on."""
    last = tl.zeros((COLUMNS,), tl.int32) + (first + plan.new_length - 1)
    for start in range(first + plan.new_length, plan.source_length, COLUMNS):
        position = start + tl.arange(0, COLUMNS)
        valid = is_valid(mask, row, position, position < plan.source_length, stride_row, stride_position)
        last = tl.where(valid, position, last)
    return tl.max(last, 0)


@triton.jit
def copy_last_slot(row, last, entry, plan, KIND: tl.constexpr, GROUPS: tl.constexpr):
    """Write the last slot of one row, and the last column of a mask over pairs of tokens."""
    last_slot = plan.new_length - 1
    source_row = entry.source + row * entry.row_stride
    out_row = entry.out + row * plan.new_length * entry.units
    for start in range(0, entry.units, GROUPS):
        unit = start + tl.arange(0, GROUPS)
        within = unit < entry.units
        if KIND == SQUARE:
            column = tl.where(unit == last_slot, last, unit).to(tl.int64)
            down = unit.to(tl.int64)
            items = tl.load(source_row + down * entry.position_stride + last * entry.unit_stride, mask=down < last_slot)
            tl.store(out_row + down * entry.units + last_slot, items, mask=down < last_slot)
        else:
            column = unit.to(tl.int64)
        items = tl.load(source_row + last * entry.position_stride + column * entry.unit_stride, mask=within)
        tl.store(out_row + last_slot * entry.units + unit, items, mask=within)


@triton.jit
def copy_row(row, first, last, entry, plan, KIND: tl.constexpr, WIDTH: tl.constexpr, GROUPS: tl.constexpr):
    """Write one row, whose tokens come from `first` on, and from `last` for the last slot."""
    last_slot = plan.new_length - 1
    groups = plan.new_length * entry.units // WIDTH
    lanes = tl.arange(0, WIDTH)[None, :]
    for start in range(0, groups, GROUPS):
        group = start + tl.arange(0, GROUPS)
        slot = group * WIDTH // entry.units
        unit = group * WIDTH % entry.units
        position = tl.where(slot == last_slot, last, first + slot).to(tl.int64)
        if KIND == SQUARE:
            unit = tl.where(unit == last_slot, last, first + unit)
        offset = row * entry.row_stride + position * entry.position_stride + unit.to(tl.int64) * entry.unit_stride
        source_offset = tl.multiple_of(offset[:, None], [1, WIDTH]) + lanes
        out_offset = tl.multiple_of((row * plan.new_length * entry.units + group * WIDTH)[:, None], [1, WIDTH]) + lanes
        within = (group < groups)[:, None]
        items = tl.load(entry.source + source_offset, mask=within)
        tl.store(entry.out + out_offset, items, mask=within)


@kernel
def resize_kernel(
    bundles, info, mask, stride_row: tl.int64, stride_position: tl.int64,
    new_rows: tl.int32, chunks: tl.int32, tokens: tl.int64, line: tl.int32, source_length: tl.int32,
    new_length: tl.int32, last_start: tl.int32, moved_by: tl.int32,
    LAYOUTS: tl.constexpr, PADS: tl.constexpr, MOVES: tl.constexpr, SKIPS_PADDING: tl.constexpr,
    KEEPS_LAST: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """`bundles` has an Entry for tensors that are copied alike, `LAYOUTS` what `make_layout` returns for it."""
    plan = ResizePlan(tokens, line, source_length, new_length, last_start, moved_by)
    row_plan = ResizePlan(new_rows, chunks, source_length, new_length, last_start, moved_by)
    tile = tl.program_id(0)
    for i in tl.static_range(len(LAYOUTS)):
        entry_plan = row_plan if LAYOUTS[i][0] == ROW else plan
        tiles = tl.cdiv(entry_plan.tokens.to(tl.int64) * bundles[i].units // LAYOUTS[i][2], GROUPS)
        programs = tiles * len(bundles[i].source)
        if tile >= 0 and tile < programs:
            copy_tile(
                tile % tiles, entry_of(bundles[i], tile // tiles, LAYOUTS[i][1]), entry_plan,
                LAYOUTS[i][0], LAYOUTS[i][2], LAYOUTS[i][3], mask, stride_row,
                PADS, MOVES, SKIPS_PADDING, KEEPS_LAST, GROUPS,
            )  # fmt: skip
        tile -= programs
    if info is not None:
        tiles = tl.cdiv(new_rows, ROWS)
        if tile >= 0 and tile < tiles:
            write_info(
                tile, info, mask, stride_row, stride_position, new_rows, plan,
                PADS, MOVES, SKIPS_PADDING, KEEPS_LAST, ROWS, COLUMNS,
            )  # fmt: skip
        tile -= tiles
    if SKIPS_PADDING and tile >= 0:
        row = tile.to(tl.int64)
        rows = row + tl.arange(0, 1)
        first = tl.max(first_kept_position(rows, rows >= 0, mask, stride_row, stride_position, plan, GROUPS), 0)
        last = first + plan.new_length - 1
        if KEEPS_LAST:
            last = last_kept_position(row, first, mask, stride_row, stride_position, plan, GROUPS)
        begins_masked = tl.load(mask + row * stride_row) == 0
        for i in tl.static_range(len(LAYOUTS)):
            if LAYOUTS[i][0] != ROW:
                for j in range(len(bundles[i].source)):
                    entry = entry_of(bundles[i], j, LAYOUTS[i][1])
                    if begins_masked:
                        copy_row(row, first, last, entry, plan, LAYOUTS[i][0], LAYOUTS[i][4], GROUPS)
                    elif KEEPS_LAST:
                        copy_last_slot(row, last.to(tl.int64), entry, plan, LAYOUTS[i][0], GROUPS)
