"""The points at which the length of a schedule changes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

#: Number of intervals in which changes are searched for: a user's own pacing may rise and fall anywhere.
_INTERVALS = 65536


class Milestone(NamedTuple):
    """A change of length: from `progress` units until the next milestone, sequences have `seq_length` tokens."""

    progress: int
    seq_length: int


def find_milestones(length_at: Callable[[int], int], duration: float, parts: int | None) -> list[Milestone]:
    """Every change of length, from progress 0 on, at whole numbers of units.

    With `parts` None, as for a pacing of your own, lengths are evaluated at 65,537 points, or at every unit if the
    duration is shorter. Between two points of different lengths, the changes are found by bisection. A bump that lies
    between two points can be missed.

    Args:
        length_at: The length after a number of units.
        duration: Number of units until the full length.
        parts: Number of equal parts of the duration in each of which no length falls; None if that is not known.
    """
    points = sorted(_points_between_changes(duration, parts))
    found = [Milestone(points[0], length_at(points[0]))]
    for start, stop in pairwise(points):
        found += _changes(length_at, Milestone(start, found[-1].seq_length), Milestone(stop, length_at(stop)))
    return found


def _points_between_changes(duration: float, parts: int | None) -> set[int]:
    """Points from 0 to the end. Between two of them, lengths either all rise or all fall."""
    end = math.ceil(duration)
    if parts is None:
        return {end, *(end * index // _INTERVALS for index in range(_INTERVALS))}
    starts = {end, *(math.ceil(Fraction(duration) * index / parts) for index in range(parts))}
    return starts | {start - 1 for start in starts if start}


def _changes(length_at: Callable[[int], int], start: Milestone, stop: Milestone) -> Iterator[Milestone]:
    """The changes after `start` up to and with `stop`."""
    if start.seq_length == stop.seq_length:
        return
    if stop.progress - start.progress == 1:
        yield stop
        return
    middle = (start.progress + stop.progress) // 2
    between = Milestone(middle, length_at(middle))
    yield from _changes(length_at, start, between)
    yield from _changes(length_at, between, stop)
