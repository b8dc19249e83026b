"""How batches are formed: a window of items that were not yielded yet, planned together at one length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..batch_planning.plan import IntArray, Piece, Plan
from ..batch_planning.planner import BatchPlanner
from .readers import Items, Reader, joined
from .state import Counts, Cursor, Position

_MAX_ATTEMPTS = 4


@dataclass
class Window:
    """The batches of some items."""

    start: Position  #: before its first batch
    items: NDArray[Any]
    plan: Plan
    yielded_up_to: tuple[tuple[int, Cursor], ...]  #: that of the position after its last batch
    ends: IntArray | None  #: (items,) int64, `BatchPlanner.ends`; None: batches hold whole items, not pieces

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.plan)

    def batch(self, index: int) -> list[Any]:
        """The items of batch `index`, or pieces of items."""
        indices, starts, lengths = self.plan.batch(index)
        items = self.items[indices].tolist()
        if self.ends is None:
            return items
        return list(map(Piece, items, starts.tolist(), lengths.tolist(), self.ends[indices].tolist()))

    def position(self, batches: int) -> Position:
        """The position after the first `batches` batches. That after the last one is the start of the next window."""
        items, tokens = self._sums
        before = self.start.yielded
        yielded = Counts(
            before.items + int(items[batches]), before.tokens + int(tokens[batches]), before.batches + batches
        )
        if batches == len(self):
            return self.start._replace(yielded_up_to=self.yielded_up_to, yielded=yielded, window_start=yielded)
        return self.start._replace(yielded=yielded)

    @cached_property
    def _sums(self) -> tuple[IntArray, IntArray]:
        return np.append(0, np.cumsum(self.plan.whole_items())), np.append(0, np.cumsum(self.plan.tokens()))


@dataclass
class WindowMaker:
    """Forms windows of the items of a reader. The same position always gives the same window.

    The scheduler of the planner, if any, is asked for the length at what was planned. Its own progress is ignored.
    """

    _reader: Reader
    _planner: BatchPlanner
    _window: int | None  #: maximum number of items that are planned together; None: all of an epoch
    _seed: int | None  #: seed of the order of batches; None: longest first
    _world_size: int  #: number of batches in a step, which a scheduler may count

    def __post_init__(self) -> None:
        scheduler = self._planner.scheduler
        self._unit = "step" if scheduler is None else scheduler.unit
        self._milestones = [] if scheduler is None else scheduler.milestones()

    def epoch_start(self, epoch: int, yielded: Counts) -> Position:
        """Where an epoch begins, once the previous one is over."""
        # The last bound also applies to longer items.
        yielded_up_to = ((self._planner.longest or 0, self._reader.begin()),)
        return Position(epoch, yielded_up_to, yielded=yielded, window_start=yielded, epoch_start=yielded)

    def form(self, position: Position) -> Window | None:
        """The open window of `position`, None at the end of the epoch."""
        start = position._replace(yielded=position.window_start)
        max_length = self._length(start)
        bound = max_length if self._planner.by_bucket and max_length is not None else start.yielded_up_to[-1][0]
        read = self._read(start, bound)
        if len(read) == 0:
            shortest = self._shortest(start) if self._planner.by_bucket else None
            return None if shortest is None else self.form(start._replace(min_length=self._next_length(shortest)))
        count, plan = self._plan(start, read.lengths, max_length)
        yielded_up_to = start.marked_yielded(bound, read.cursor_after(count))
        ends = self._planner.ends(read.lengths[:count], max_length) if self._planner.cuts_items else None
        return Window(start, read.items[:count], plan, yielded_up_to, ends)

    def _read(self, start: Position, max_length: int) -> Items:
        """The next items of at most `max_length` tokens that are left, fewer than a window at the end of the epoch."""
        parts, missing = [], self._window
        for read in self._windows(start.epoch, start.first_left(max_length)):
            chosen = np.flatnonzero(start.is_left(read.lengths, read.positions, max_length))[:missing]
            parts.append(read.select(chosen))  # `read` itself would keep its other items in memory
            if missing is not None and (missing := missing - len(chosen)) == 0:
                break
        return joined(parts)

    def _shortest(self, start: Position) -> int | None:
        """Length of the shortest item that is left, at most the last bound; None at the end of the epoch."""
        bound, cursor = start.yielded_up_to[-1]
        shortest = bound + 1
        for read in self._windows(start.epoch, cursor):
            lengths = np.minimum(read.lengths, bound)[start.is_left(read.lengths, read.positions, bound)]
            shortest = int(lengths.min(initial=shortest))
        return shortest if shortest <= bound else None

    def _windows(self, epoch: int, cursor: Cursor) -> Iterator[Items]:
        """All items of the epoch from `cursor` on, a window at a time."""
        while True:
            read = self._reader.read(epoch, cursor, self._window)
            self._planner.check(read.lengths, cursor["position"])
            yield read
            if self._window is None or len(read) < self._window:
                return
            cursor = read.cursor_after(len(read))

    def _length(self, start: Position) -> int | None:
        """The current length; None without a scheduler."""
        scheduler = self._planner.scheduler
        if scheduler is None:
            return None
        return max(scheduler.seq_length_at(self._progress(start.yielded)), start.min_length)

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
            # Counts the items of this epoch only, so that epoch n is the same whatever was yielded before it.
            seeds = self._seed, start.epoch, start.yielded.items - start.epoch_start.items
        plan = partial(self._planner.plan, max_length=max_length, seeds=seeds)
        tokens = np.cumsum(self._planner.tokens(lengths, max_length))
        count = self._count_until_change(start.yielded, lengths, tokens, plan)
        if self._planner.packed:
            count = max(count, int((lengths > 0).argmax()) + 1)
            if count == len(lengths) == self._window:
                assert self._planner.max_tokens is not None
                return _full_packs(lengths, tokens, self._planner.max_tokens, plan)
        return count, plan(lengths[:count])

    def _count_until_change(
        self, yielded: Counts, lengths: IntArray, tokens: IntArray, plan: Callable[[IntArray], Plan]
    ) -> int:
        """How many of the first items are planned before the schedule's length changes, at least one.

        `tokens` (items,) int64 are those of each item and of all before it.
        """
        next_change = bisect_right(self._milestones, self._progress(yielded), key=attrgetter("progress"))
        if next_change == len(self._milestones):
            return len(lengths)
        change = self._milestones[next_change].progress
        if self._unit == "sample":
            return min(change - yielded.items, len(lengths))
        if self._unit == "token":
            return min(int(np.searchsorted(tokens, change - yielded.tokens)) + 1, len(lengths))
        batches = change * self._world_size - yielded.batches
        bound = 2
        while bound < len(lengths) and len(plan(lengths[:bound])) <= batches:
            bound *= 2
        counts = range(1, min(bound, len(lengths)) + 1)
        return max(bisect_right(counts, batches, key=lambda count: len(plan(lengths[:count]))), 1)

    def _progress(self, yielded: Counts) -> int:
        """What was yielded, in the unit of the schedule."""
        units = {"step": yielded.batches // self._world_size, "token": yielded.tokens, "sample": yielded.items}
        return units[self._unit]


def _full_packs(
    lengths: IntArray, tokens: IntArray, max_tokens: int, plan: Callable[[IntArray], Plan]
) -> tuple[int, Plan]:
    """How many of the first items fill their packs, and the plan for them.

    Planning all items would leave the last pack half empty on average.
    """
    packs, reserve = int(tokens[-1]) // max_tokens, 0
    for _ in range(_MAX_ATTEMPTS if packs else 0):
        count = int(np.searchsorted(tokens, packs * max_tokens - reserve, side="right"))
        planned = plan(lengths[:count])
        if count and len(planned) <= packs:
            return count, planned
        reserve = max(2 * reserve, int(planned.padded_tokens.min(initial=max_tokens)))
    return len(lengths), plan(lengths)
