"""How batches are formed: a window of items that were not served yet, planned together at one length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..batch_planning.plan import IntArray, Piece, Plan
from ..batch_planning.planner import BatchPlanner
from .readers import Items, Reader, joined, select_items
from .served import first_unserved, is_unserved, marked_served
from .state import Counts, Cursor, Position

_MAX_ATTEMPTS = 4


@dataclass
class Window:
    """The batches of some items."""

    start: Position  #: before its first batch
    items: Sequence[Any] | IntArray
    plan: Plan
    served_up_to: tuple[tuple[int, Cursor], ...]  #: that of the position after its last batch
    ends: IntArray | None  #: (items,) int64, `BatchPlanner.ends`; None: batches hold whole items, not pieces

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.plan)

    def batch(self, index: int) -> list[Any]:
        """The items of batch `index`, or pieces of items."""
        indices, starts, lengths = self.plan.batch(index)
        selected = select_items(self.items, indices)
        items = selected.tolist() if isinstance(selected, np.ndarray) else selected
        if self.ends is None:
            return items
        return list(map(Piece, items, starts.tolist(), lengths.tolist(), self.ends[indices].tolist()))

    def position(self, batches: int) -> Position:
        """The position after the first `batches` batches. That after the last one is the start of the next window."""
        items, tokens = self._sums
        before = self.start.served
        served = Counts(
            before.items + int(items[batches]), before.tokens + int(tokens[batches]), before.batches + batches
        )
        if batches == len(self):
            return self.start._replace(served_up_to=self.served_up_to, served=served, window_start=served)
        return self.start._replace(served=served)

    @cached_property
    def _sums(self) -> tuple[IntArray, IntArray]:
        return np.append(0, np.cumsum(self.plan.whole_items())), np.append(0, np.cumsum(self.plan.tokens()))


class WindowMaker:
    """Forms windows of the items of a reader. The same position always gives the same window.

    The scheduler of the planner, if any, is asked for the length at what was planned. Its own progress is ignored.

    Args:
        window: maximum number of items that are planned together; None: all of an epoch.
        seed: seed of the order of batches; None: longest first.
        world_size: number of batches in a step, which a scheduler may count.
    """

    def __init__(
        self, reader: Reader, planner: BatchPlanner, window: int | None, seed: int | None, world_size: int
    ) -> None:
        self._reader = reader
        self._planner = planner
        self._window = window
        self._seed = seed
        self._world_size = world_size
        scheduler = planner.scheduler
        self._unit = "step" if scheduler is None else scheduler.unit
        self._milestones = [] if scheduler is None else scheduler.milestones()
        self._changes = [milestone.progress for milestone in self._milestones]

    def epoch_start(self, epoch: int, served: Counts) -> Position:
        """Where an epoch begins, once the previous one is over."""
        # The last bound also applies to longer items.
        served_up_to = ((self._planner.longest or 0, self._reader.begin()),)
        return Position(epoch, served_up_to, served=served, window_start=served, epoch_start=served)

    def form(self, position: Position) -> Window | None:
        """The open window of `position`, None at the end of the epoch."""
        start = position._replace(served=position.window_start)
        max_length = self._length(start)
        read = self._read(start, max_length)
        if len(read) == 0:
            shortest = self._shortest(start) if self._planner.by_bucket else None
            return None if shortest is None else self.form(start._replace(min_length=self._next_length(shortest)))
        count, plan = self._plan(start, read.lengths, max_length)
        bound = max_length if self._planner.by_bucket and max_length is not None else start.served_up_to[-1][0]
        served_up_to = marked_served(start.served_up_to, bound, read.cursor_after(count))
        ends = self._planner.ends(read.lengths[:count], max_length) if self._planner.cuts_items else None
        # A copy would cost time, and the items that are not planned are in the next window.
        return Window(start, read.items if count == len(read) else read.items[:count], plan, served_up_to, ends)

    def _read(self, start: Position, max_length: int | None) -> Items:
        """The next items that were not served, fewer than a window at the end of the epoch.

        Under warmup by bucket, those of at most `max_length` tokens.
        """
        if not self._planner.by_bucket or max_length is None:
            return self._read_all(start.epoch, start.served_up_to[0][1])
        parts, missing = [], self._window
        for read in self._windows(start.epoch, first_unserved(start.served_up_to, max_length)):
            chosen = np.flatnonzero(is_unserved(start.served_up_to, read, max_length))[:missing]
            parts.append(read.select(chosen))  # `read` itself would keep its other items in memory
            if missing is not None and (missing := missing - len(chosen)) == 0:
                break
        return joined(parts)

    def _shortest(self, start: Position) -> int | None:
        """Length of the shortest unserved item, at most the last bound; None at the end of the epoch."""
        bound, cursor = start.served_up_to[-1]
        shortest = bound + 1
        for read in self._windows(start.epoch, cursor):
            lengths = np.minimum(read.lengths, bound)[is_unserved(start.served_up_to, read, bound)]
            shortest = int(lengths.min(initial=shortest))
        return shortest if shortest <= bound else None

    def _windows(self, epoch: int, cursor: Cursor) -> Iterator[Items]:
        """All items of the epoch from `cursor` on, a window at a time."""
        while True:
            read = self._read_all(epoch, cursor)
            yield read
            if self._window is None or len(read) < self._window:
                return
            cursor = read.cursor_after(len(read))

    def _read_all(self, epoch: int, cursor: Cursor) -> Items:
        read = self._reader.read(epoch, cursor, self._window)
        self._planner.check(read.lengths, cursor["position"])
        return read

    def _length(self, start: Position) -> int | None:
        """The current length; None without a scheduler."""
        scheduler = self._planner.scheduler
        if scheduler is None:
            return None
        return max(scheduler.seq_length_at(self._progress(start.served)), start.min_length)

    def _next_length(self, min_length: int) -> int:
        """The shortest length of the schedule that is at least `min_length`, else the scheduler's max_seq_length."""
        assert self._planner.scheduler is not None
        lengths = [milestone.seq_length for milestone in self._milestones if milestone.seq_length >= min_length]
        return min(lengths, default=self._planner.scheduler.max_seq_length)

    def _plan(self, start: Position, lengths: IntArray, max_length: int | None) -> tuple[int, Plan]:
        """How many of the first items are planned now, at least one, and the plan for them.

        If packed, one of them has tokens, unless no item has.
        """
        seeds = None
        if self._seed is not None:
            # Counts the items of this epoch only, so that epoch n is the same whatever was served before it.
            seeds = self._seed, start.epoch, start.served.items - start.epoch_start.items
        count = self._count_until_change(start.served, lengths, max_length)
        if self._planner.packed:
            count = max(count, int((lengths > 0).argmax()) + 1)
            if count == len(lengths) == self._window:
                return _plan_full_packs(self._planner, lengths, max_length, seeds)
        return count, self._planner.plan(lengths[:count], max_length=max_length, seeds=seeds)

    def _count_until_change(self, served: Counts, lengths: IntArray, max_length: int | None) -> int:
        """How many of the first items are planned before the schedule's length changes, at least one."""
        next_change = bisect_right(self._changes, self._progress(served))
        if next_change == len(self._changes):
            return len(lengths)
        change = self._changes[next_change]
        if self._unit == "sample":
            return min(change - served.items, len(lengths))
        if self._unit == "token":
            tokens = np.cumsum(self._planner.tokens(lengths, max_length))
            return min(int(np.searchsorted(tokens, change - served.tokens)) + 1, len(lengths))
        batches = change * self._world_size - served.batches
        return _count_for_batches(self._planner, lengths, max_length, batches)

    def _progress(self, served: Counts) -> int:
        """What was served, in the unit of the schedule."""
        units = {"step": served.batches // self._world_size, "token": served.tokens, "sample": served.items}
        return units[self._unit]


def _count_for_batches(planner: BatchPlanner, lengths: IntArray, max_length: int | None, batches: int) -> int:
    """How many of the first items fit into `batches` batches, at least one."""

    def needed(count: int) -> int:
        return planner.num_batches(lengths[:count], max_length)

    bound = 2
    while bound < len(lengths) and needed(bound) <= batches:
        bound *= 2
    return max(bisect_right(range(1, min(bound, len(lengths)) + 1), batches, key=needed), 1)


def _plan_full_packs(
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
