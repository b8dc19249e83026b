"""The kernel of `moment_statistics`: all tensors of all lists in one launch.

A table on the device holds the tensors' addresses. Tensors are cut into chunks, numbered from the first tensor to the
last, and each program reads one chunk: it looks up the chunk's tensor, and stores the chunk's sum and maximum. The
program that finishes last in a group of `SEARCH` chunks adds up the group's results, and the program that finishes last
of all adds up those of the groups. Both add in the chunks' order, so the bits of the result do not depend on which
program is last.

Each lane sums `STEPS` numbers in float32; all other sums are float64. No number is negative, so the relative error of
an addition is at most 2^-24, like that of a root or a square. The relative error of a total is at most
(STEPS + 1) · 2^-24: 5.4e-7 for 8 steps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_launch import kernel

#: Rows of the table.
BASE = tl.constexpr(0)  # address of the first element, rounded down to a multiple of 16 bytes
LEAD = tl.constexpr(1)  # number of elements between BASE and the first element
END = tl.constexpr(2)  # index after the last element, counted from BASE
FIRST_CHUNK = tl.constexpr(3)  # number of the tensor's first chunk
DTYPE = tl.constexpr(4)

#: Codes of dtypes.
FLOAT32 = tl.constexpr(0)
BFLOAT16 = tl.constexpr(1)
FLOAT16 = tl.constexpr(2)

# Device functions return once, at their end: Triton compiles unreachable return statements as well.


@triton.jit
def aligned(base, ITEM: tl.constexpr):
    """An address as an aligned pointer. The compiler cannot infer the alignment of an address that it loads."""
    return tl.multiple_of(base.to(tl.pointer_type(ITEM)), 16)


@triton.jit
def load(pointer, start, lead, end, BLOCK: tl.constexpr):
    """The block of elements from `start` on, with 0 outside of the tensor.

    Only blocks at the edges of a tensor use a mask: with a mask the compiler loads one element at a time.
    """
    index = start + tl.arange(0, BLOCK)
    if start >= lead and start + BLOCK <= end:
        items = tl.load(pointer + index)
    else:
        items = tl.load(pointer + index, mask=(index >= lead) & (index < end), other=0)
    return items


@triton.jit
def load_float32(base, dtype, start, lead, end, BLOCK: tl.constexpr):
    if dtype == FLOAT32:
        values = load(aligned(base, tl.float32), start, lead, end, BLOCK)
    elif dtype == BFLOAT16:  # the upper half of a float32
        bits = load(aligned(base, tl.int16), start, lead, end, BLOCK)
        values = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif dtype == FLOAT16:
        values = load(aligned(base, tl.float16), start, lead, end, BLOCK).to(tl.float32)
    else:
        values = load(aligned(base, tl.float64), start, lead, end, BLOCK).to(tl.float32)
    return values


@triton.jit
def entry_of(chunk, first_chunks, entries, chunks, BLOCK: tl.constexpr):
    """The entry of a chunk's tensor: the last entry whose first chunk is not after `chunk`.

    Each step compares `BLOCK` entries at equal distances, and continues between two of them.
    """
    entry = 0
    distance = entries
    while distance > 1:
        distance = tl.cdiv(distance, BLOCK)
        index = entry + distance * tl.arange(0, BLOCK)
        first = tl.load(first_chunks + index, mask=index < entries, other=chunks)
        entry += (tl.sum((first <= chunk).to(tl.int32)) - 1) * distance
    return entry


@triton.jit
def reduce_partials(totals, maxima, begin, end, BLOCK: tl.constexpr):
    """The sum and the maximum of results. If the sum is NaN, so is the maximum, which ignores NaN."""
    total = tl.zeros([BLOCK], dtype=tl.float64)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(begin, end, BLOCK):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(totals + index, mask=index < end, other=0, cache_modifier=".cg")
        largest = tl.maximum(largest, tl.load(maxima + index, mask=index < end, other=0, cache_modifier=".cg"))
    total = tl.sum(total)
    maximum = tl.max(largest).to(tl.float64)
    return total, tl.where(total == total, maximum, total)


@triton.jit
def reduce_group(totals, maxima, begin, end, group_total, group_maximum, BLOCK: tl.constexpr):
    total, maximum = reduce_partials(totals, maxima, begin, end, BLOCK)
    tl.store(group_total, total)
    tl.store(group_maximum, maximum.to(tl.float32))


@kernel
def moment_kernel(
    table, totals, maxima, tickets, out,
    entries: tl.int32, momentum_from: tl.int32, gradients_from: tl.int32, chunks: tl.int32,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, SEARCH: tl.constexpr,
):  # fmt: skip
    """Chunks before `momentum_from` are second moments; chunks from `gradients_from` on are gradients.

    `totals` and `maxima` hold the results of the chunks, and then those of the groups, for each of the three lists.
    `tickets` are zero before and after a launch: one for each group, and one for the groups.
    """
    chunk = tl.program_id(0)
    entry = entry_of(chunk, table + FIRST_CHUNK * entries, entries, chunks, SEARCH)
    base = tl.load(table + BASE * entries + entry)
    lead = tl.load(table + LEAD * entries + entry)
    end = tl.load(table + END * entries + entry)
    dtype = tl.load(table + DTYPE * entries + entry)
    begin = (chunk - tl.load(table + FIRST_CHUNK * entries + entry)) * (BLOCK * STEPS)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    largest = tl.zeros([BLOCK], dtype=tl.float32)
    for step in range(STEPS):
        values = load_float32(base, dtype, begin + step * BLOCK, lead, end, BLOCK)
        if chunk < momentum_from:
            values = tl.sqrt_rn(values)
        elif chunk < gradients_from:
            values = tl.abs(values)
        else:
            values = values * values
        total += values
        largest = tl.maximum(largest, values)
    tl.store(totals + chunk, tl.sum(total.to(tl.float64)))
    tl.store(maxima + chunk, tl.max(largest))
    tl.debug_barrier()  # both are written before the ticket is taken
    group = chunk // SEARCH
    groups = tl.cdiv(chunks, SEARCH)
    first = group * SEARCH
    last = tl.minimum(first + SEARCH, chunks)
    if tl.atomic_add(tickets + group, 1, sem="acq_rel") == last - first - 1:
        tl.store(tickets + group, 0)  # for the next launch
        variance, variance_maxima = totals + chunks, maxima + chunks
        momentum, momentum_maxima = variance + groups, variance_maxima + groups
        gradients, gradients_maxima = momentum + groups, momentum_maxima + groups
        from_momentum, from_gradients = tl.maximum(first, momentum_from), tl.maximum(first, gradients_from)
        to_momentum, to_gradients = tl.minimum(last, momentum_from), tl.minimum(last, gradients_from)
        reduce_group(totals, maxima, first, to_momentum, variance + group, variance_maxima + group, SEARCH)
        reduce_group(totals, maxima, from_momentum, to_gradients, momentum + group, momentum_maxima + group, SEARCH)
        reduce_group(totals, maxima, from_gradients, last, gradients + group, gradients_maxima + group, SEARCH)
        tl.debug_barrier()
        if tl.atomic_add(tickets + groups, 1, sem="acq_rel") == groups - 1:
            variance_l1, variance_max = reduce_partials(variance, variance_maxima, 0, groups, SEARCH)
            momentum_l1, momentum_max = reduce_partials(momentum, momentum_maxima, 0, groups, SEARCH)
            squares, _ = reduce_partials(gradients, gradients_maxima, 0, groups, SEARCH)
            tl.store(out, variance_l1)
            tl.store(out + 1, variance_max)
            tl.store(out + 2, momentum_l1)
            tl.store(out + 3, momentum_max)
            tl.store(out + 4, squares)
            tl.store(tickets + groups, 0)
