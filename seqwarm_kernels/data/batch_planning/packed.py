"""Which whole items fill each packed batch."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from .plan import IntArray


def pack(lengths: IntArray, max_tokens: int) -> tuple[IntArray, IntArray]:
    """First-fit decreasing: add the longest item that fits until none fits, then start the next batch.

    Items of equal length are added together, so the time depends on the number of runs, not of items. Items of length 0
    are all in the first batch, which has no other items only if there are none.
    Source: D. Johnson et al., "Worst-case performance bounds for simple one-dimensional packing algorithms", 1974.

    Args:
        lengths: (items,) int64, each from 0 to `max_tokens`.
        max_tokens: maximum number of tokens in a batch.

    Returns:
        (items,) int64, indices into `lengths`, batch by batch; (batches + 1,) int64, where batches begin and end.
    """
    by_length = np.argsort(lengths, kind="stable")
    sizes_array, begins = np.unique(lengths[by_length], return_index=True)
    sizes, first = sizes_array.tolist(), begins.tolist()
    counts = np.diff(np.append(begins, len(lengths))).tolist()
    runs = [by_length[:0]]
    boundaries, packed = [0], 0
    while sizes:
        room = max_tokens
        while (index := bisect_right(sizes, room) - 1) >= 0:
            size = sizes[index]
            count = min(counts[index], room // size) if size else counts[index]
            runs.append(by_length[first[index] : first[index] + count])
            packed += count
            room -= count * size
            if count == counts[index]:
                del sizes[index], counts[index], first[index]
            else:
                first[index] += count
                counts[index] -= count
        boundaries.append(packed)
    return np.concatenate(runs), np.asarray(boundaries)
