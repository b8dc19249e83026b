"""Which whole items fill a packed batch."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from .plan import IntArray


class Packs(NamedTuple):
    order: IntArray  #: (items,) int64, places in the lengths that were packed, batch by batch
    cuts: IntArray  #: (batches + 1,) int64: batch b holds order[cuts[b]:cuts[b + 1]]


def pack(lengths: IntArray, max_tokens: int) -> Packs:
    """First fit decreasing: the longest item with room for it goes in, until none fits; then the next batch.

    Items of one length are taken together, so the work goes with the number of runs, not of items.
    Source: D. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974.

    Args:
        lengths: (items,) int64, each from 0 to `max_tokens`.
        max_tokens: of a batch, at most.
    """
    by_length = np.argsort(lengths, kind="stable")
    sizes_array, begins = np.unique(lengths[by_length], return_index=True)
    sizes, first = sizes_array.tolist(), begins.tolist()
    counts = np.diff(np.append(begins, len(lengths))).tolist()
    run_begins: list[int] = []
    run_counts: list[int] = []
    cuts, taken = [0], 0
    while sizes:
        room = max_tokens
        while (at := bisect_right(sizes, room) - 1) >= 0:
            size = sizes[at]
            count = min(counts[at], room // size) if size else counts[at]
            run_begins.append(first[at])
            run_counts.append(count)
            taken += count
            room -= count * size
            if count == counts[at]:
                del sizes[at], counts[at], first[at]
            else:
                first[at] += count
                counts[at] -= count
        cuts.append(taken)
    return Packs(by_length[_ranges(run_begins, run_counts)], np.asarray(cuts, dtype=np.int64))


def _ranges(begins: list[int], counts: list[int]) -> IntArray:
    """range(begin, begin + count) of each, one after another."""
    sizes = np.asarray(counts, dtype=np.int64)
    shifts = np.asarray(begins, dtype=np.int64) - (np.cumsum(sizes) - sizes)
    return np.arange(int(sizes.sum()), dtype=np.int64) + np.repeat(shifts, sizes)
