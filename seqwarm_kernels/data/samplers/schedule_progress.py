"""The current length of a schedule, and how many items are planned before that length changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..batch_planning.plan import IntArray, Plan
from ..batch_planning.planner import BatchPlanner

_MAX_ATTEMPTS = 4


class Counts(NamedTuple):
    """Numbers for all ranks together since the beginning of training."""

    items: int = 0
    tokens: int = 0  #: without padding
    batches: int = 0


class ScheduleProgress:
    """Follows the planner's scheduler, if any, by what was planned. The scheduler's own progress is ignored.

    Args:
        window: maximum number of items that are planned together, more if they are packed and these have no
            tokens; None: all of an epoch.
        world_size: number of batches in a step.
    """

    def __init__(self, planner: BatchPlanner, window: int | None, world_size: int) -> None:
        self._planner = planner
        self._window = window
        self._world_size = world_size
        self._scheduler = planner.scheduler
        self._unit = None if planner.scheduler is None else planner.scheduler.unit
        self._milestones = [] if planner.scheduler is None else planner.scheduler.milestones()
        self._changes = [milestone.progress for milestone in self._milestones]

    def length(self, counts: Counts, min_length: int) -> int | None:
        """The current length, at least `min_length`; None without a scheduler."""
        if self._scheduler is None:
            return None
        return max(self._scheduler.seq_length_at(self._progress(counts)), min_length)

    def next_length(self, min_length: int) -> int:
        """The shortest length of the schedule that is at least `min_length`, else the scheduler's max_seq_length."""
        assert self._scheduler is not None
        lengths = [milestone.seq_length for milestone in self._milestones if milestone.seq_length >= min_length]
        return min(lengths, default=self._scheduler.max_seq_length)

    def plan(
        self, counts: Counts, lengths: IntArray, max_length: int | None, seeds: Sequence[int] | None
    ) -> tuple[int, Plan]:
        """How many of the first items are planned now, at least one, and the plan for them.

        If packed, one of them has tokens, unless no item has.
        """
        count = self._count_until_change(counts, lengths, max_length)
        if self._planner.packed:
            count = max(count, int((lengths > 0).argmax()) + 1)
            if count == len(lengths) == self._window:
                return count_filling_packs(self._planner, lengths, max_length, seeds)
        return count, self._planner.plan(lengths[:count], max_length=max_length, seeds=seeds)

    def _count_until_change(self, counts: Counts, lengths: IntArray, max_length: int | None) -> int:
        """How many of the first items are planned before the schedule's length changes, at least one."""
        next_change = bisect_right(self._changes, self._progress(counts))
        if next_change == len(self._changes):
            return len(lengths)
        change = self._changes[next_change]
        if self._unit == "step":
            return count_for_batches(self._planner, lengths, max_length, change * self._world_size - counts.batches)
        if self._unit == "token":
            tokens = np.cumsum(self._planner.tokens(lengths, max_length))
            count = int(np.searchsorted(tokens, change - counts.tokens)) + 1
        else:
            count = change - counts.items
        return min(count, len(lengths))

    def _progress(self, counts: Counts) -> int:
        if self._unit == "step":
            return counts.batches // self._world_size
        return counts.tokens if self._unit == "token" else counts.items


def count_for_batches(planner: BatchPlanner, lengths: IntArray, max_length: int | None, batches: int) -> int:
    """How many of the first items fit into `batches` batches, at least one."""

    def fits(count: int) -> bool:
        return planner.num_batches(lengths[:count], max_length) <= batches

    low, high = 1, 2
    while high < len(lengths) and fits(high):
        low, high = high, 2 * high
    high = min(high, len(lengths))
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def count_filling_packs(
    planner: BatchPlanner, lengths: IntArray, max_length: int | None, seeds: Sequence[int] | None
) -> tuple[int, Plan]:
    """How many of the first items fill their packs, and the plan for them.

    Planning all items would leave the last pack half empty on average.
    """
    tokens = np.cumsum(planner.tokens(lengths, max_length))
    assert planner.max_tokens is not None
    packs, reserve = int(tokens[-1]) // planner.max_tokens, 0
    for _ in range(_MAX_ATTEMPTS if packs else 0):
        count = int(np.searchsorted(tokens, packs * planner.max_tokens - reserve, side="right"))
        plan = planner.plan(lengths[:count], max_length=max_length, seeds=seeds)
        if count and len(plan) <= packs:
            return count, plan
        overflow = int(plan.padded_tokens.min(initial=planner.max_tokens))
        reserve = max(2 * reserve, overflow)
    return len(lengths), planner.plan(lengths, max_length=max_length, seeds=seeds)
