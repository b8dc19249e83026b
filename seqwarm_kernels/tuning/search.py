"""The order in which candidates are tried, as a pure function without any training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial


def largest_stable(lengths: int, durations: int, is_stable: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """The smallest stable length, and the largest duration that is stable with this length.

    First, lengths are raised at the shortest duration until one is stable. If none is stable, that duration may be too
    short: all lengths are tried at longer durations, with the distance doubling. Then bisection finds the largest
    stable duration. Bisection assumes that stability, once reached, ends at some duration and does not return.

    Number of trials: at most lengths + ⌈log₂ durations⌉ if a length is stable at the shortest duration, and at most
    lengths · (2 + ⌊log₂ durations⌋) + ⌈log₂ durations⌉ in any case. A range of stable durations, from the a-th to the
    b-th, is found if b ≥ 2a − 1, or if it includes the longest; a narrower range may be missed.

    Args:
        lengths: number of minimum lengths, in increasing order.
        durations: number of durations, in increasing order.
        is_stable: runs the trial of (length index, duration index). Called at most once for each candidate.

    Returns:
        The indices of a candidate whose trial was stable, or None if no trial was stable.
    """
    for duration in _doubling_indices(durations):
        for length in range(lengths):
            if is_stable(length, duration):
                return length, _bisect(duration, durations, partial(is_stable, length))
    return None


def _doubling_indices(count: int) -> Iterator[int]:
    """0, 1, 3, 7, ... and the last index."""
    index = 0
    while index < count - 1:
        yield index
        index = 2 * index + 1
    yield count - 1


def _bisect(stable: int, end: int, is_stable: Callable[[int], bool]) -> int:
    """The largest stable index in [stable, end). The index `stable` is known to be stable."""
    while end - stable > 1:
        middle = (stable + end) // 2
        if is_stable(middle):
            stable = middle
        else:
            end = middle
    return stable
