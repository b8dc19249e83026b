"""Which candidate to try next: the rule by itself, without any training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial


def largest_stable(lengths: int, durations: int, is_stable: Callable[[int, int], bool]) -> tuple[int, int] | None:
    """The smallest length that works, and the largest duration that works with it.

    First lengths are raised at the shortest duration until one is stable. If none is, that duration may be too short
    to help: all lengths are tried at longer ones, the distance doubling. Then the largest stable duration is found by
    bisection, which takes it that stability, once reached, ends once and for all as durations grow.

    Trials: at most lengths + ⌈log₂ durations⌉ where a length is stable at the shortest duration, and in any case at
    most lengths · (2 + ⌊log₂ durations⌋) + ⌈log₂ durations⌉. A stretch of stable durations, from the a-th to the
    b-th, is found where b ≥ 2a − 1, or where it includes the longest; a narrower one may be missed.

    Args:
        lengths: number of minimum lengths, from short to long.
        durations: number of durations, from short to long.
        is_stable: runs the trial of (length index, duration index); never asked for the same one twice.

    Returns:
        The indices of a candidate whose trial was stable, or None where no trial was.
    """
    for duration in _further_and_further(durations):
        for length in range(lengths):
            if is_stable(length, duration):
                return length, _bisect(duration, durations, partial(is_stable, length))
    return None


def _further_and_further(count: int) -> Iterator[int]:
    """0, 1, 3, 7, ... and the last."""
    index = 0
    while index < count - 1:
        yield index
        index = 2 * index + 1
    yield count - 1


def _bisect(stable: int, end: int, is_stable: Callable[[int], bool]) -> int:
    """The largest stable index in [stable, end), where `stable` is known to be."""
    while end - stable > 1:
        middle = (stable + end) // 2
        if is_stable(middle):
            stable = middle
        else:
            end = middle
    return stable
