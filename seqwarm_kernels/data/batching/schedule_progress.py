"""How long sequences are now, and for how many items more."""

from __future__ import annotations

from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from ..planning.plan import IntArray
from ..planning.planner import BatchPlanner
from .fit import fitting


class Counts(NamedTuple):
    """What was planned for all ranks together since the beginning."""

    items: int = 0
    tokens: int = 0  #: without padding
    batches: int = 0


class Pace:
    """A planner's scheduler, if it has one, at what was planned so far: its curve, not its own progress."""

    def __init__(self, planner: BatchPlanner, world_size: int) -> None:
        self._planner = planner
        self._world_size = world_size
        self._scheduler = planner.scheduler
        self._milestones = [] if planner.scheduler is None else planner.scheduler.milestones()
        self._changes = [milestone.progress for milestone in self._milestones]

    def length(self, counts: Counts) -> int | None:
        """Tokens in a sequence now; None without a scheduler."""
        return None if self._scheduler is None else self._scheduler.seq_length_at(self._progress(counts))

    def next_length(self, at_least: int, longest: int) -> int:
        """The shortest of the schedule's lengths that is not below that; `longest` if there is none."""
        lengths = [milestone.seq_length for milestone in self._milestones if milestone.seq_length >= at_least]
        return min(lengths, default=longest)

    def items_until_change(self, counts: Counts, lengths: IntArray, max_length: int | None) -> int | None:
        """How many items, at least one, are planned before the schedule's length changes; None: all and more."""
        next_change = bisect_right(self._changes, self._progress(counts))
        if next_change == len(self._changes):
            return None
        change = self._changes[next_change]
        if self._unit == "step":
            count = fitting(self._planner, lengths, max_length, change * self._world_size - counts.batches)
        elif self._unit == "token":
            tokens = np.cumsum(self._planner.tokens(lengths, max_length))
            count = int(np.searchsorted(tokens, change - counts.tokens)) + 1
        else:
            count = change - counts.items
        return count if count < len(lengths) else None

    @property
    def _unit(self) -> str | None:
        return None if self._scheduler is None else self._scheduler.unit

    def _progress(self, counts: Counts) -> int:
        if self._unit == "step":
            return counts.batches // self._world_size
        return counts.tokens if self._unit == "token" else counts.items
