"""Windows: groups of items that are planned together, one window after another."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..batch_planning.plan import IntArray, Piece, Plan
from ..batch_planning.planner import BatchPlanner
from .readers import Reader, select_items
from .schedule_progress import Counts, ScheduleProgress
from .served import ServedUpTo, UnservedItems, UnservedReader

#: A window of at least this many items is not doubled: an infinite source may have no item with tokens.
_MANY_ITEMS = 100_000


class Start(NamedTuple):
    """Where a window begins: enough to form this window and every later one."""

    epoch: int
    served_up_to: tuple[ServedUpTo, ...]
    counts: Counts  #: planned before the window
    epoch_start_counts: Counts  #: planned before the epoch
    min_length: int = 0  #: the current length is at least this, because no shorter item was left in the epoch


class Window:
    """The batches of some items, and where the next window begins.

    Args:
        ends: (items,) int64, `BatchPlanner.ends`. None: batches hold whole items, not pieces.
    """

    def __init__(
        self,
        start: Start,
        items: Sequence[Any],
        plan: Plan,
        max_length: int | None,
        next_start: Start,
        ends: IntArray | None,
    ) -> None:
        self.start = start
        self.plan = plan
        self.max_length = max_length
        self.next_start = next_start
        self.num_items = len(items)
        self._items = items
        self._ends = ends

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.plan)

    def batch(self, index: int) -> list[Any]:
        """The items of batch `index`, or pieces of items."""
        indices, starts, lengths = self.plan.batch(index)
        selected = select_items(self._items, indices)
        items = selected.tolist() if isinstance(selected, np.ndarray) else selected
        if self._ends is None:
            return items
        return list(map(Piece, items, starts.tolist(), lengths.tolist(), self._ends[indices].tolist()))

    def counts(self, batches: int) -> Counts:
        """The counts after the first `batches` batches."""
        items, tokens = self._sums
        start = self.start.counts
        return Counts(start.items + int(items[batches]), start.tokens + int(tokens[batches]), start.batches + batches)

    @cached_property
    def _sums(self) -> tuple[IntArray, IntArray]:
        return np.append(0, np.cumsum(self.plan.whole_items())), np.append(0, np.cumsum(self.plan.tokens()))


class WindowMaker:
    """Forms windows of the items of a reader.

    Args:
        window: maximum number of items that are planned together, more if they are packed and these have no
            tokens; None: all of an epoch.
        seed: seed of the order of batches; None: longest first.
        world_size: number of batches in a step, which a scheduler may count.
    """

    def __init__(
        self, reader: Reader, planner: BatchPlanner, window: int | None, seed: int | None, world_size: int
    ) -> None:
        self._planner = planner
        self._window = window
        self._seed = seed
        self._schedule = ScheduleProgress(planner, window, world_size)
        self._reader = UnservedReader(reader, planner, window)

    def epoch_start(self, epoch: int, counts: Counts) -> Start:
        """Where an epoch begins, once the previous one is over."""
        return Start(epoch, self._reader.begin(), counts, epoch_start_counts=counts)

    def form(self, start: Start) -> Window | None:
        """The window that begins at `start`, None at the end of the epoch."""
        max_length = self._schedule.length(start.counts, start.min_length)
        unserved = self._read_window(start, max_length)
        if len(unserved.lengths) > 0:
            count, plan = self._schedule.plan(start.counts, unserved.lengths, max_length, self._seeds(start))
            return self._make_window(start, unserved, count, plan, max_length)
        if not self._planner.by_bucket:
            return None
        shortest = self._reader.shortest(start.epoch, start.served_up_to)
        if shortest is None:
            return None
        return self.form(start._replace(min_length=self._schedule.next_length(shortest)))

    def form_again(self, start: Start, num_items: int, max_length: int | None) -> Window | None:
        """A window that was formed before, None if there are fewer items now."""
        unserved = self._read(start, max_length, num_items)
        if len(unserved.lengths) < num_items:
            return None
        plan = self._planner.plan(unserved.lengths, max_length=max_length, seeds=self._seeds(start))
        return self._make_window(start, unserved, num_items, plan, max_length)

    def _read_window(self, start: Start, max_length: int | None) -> UnservedItems:
        """The items of the next window. Packed items without tokens are read together with one that has tokens.

        Alone, they would be a batch without tokens.
        """
        count, unserved = self._window, self._read(start, max_length, self._window)
        while self._planner.packed and count is not None and count < _MANY_ITEMS:
            if len(unserved.lengths) < count or unserved.lengths.any():
                break
            count *= 2
            unserved = self._read(start, max_length, count)
        return unserved

    def _read(self, start: Start, max_length: int | None, count: int | None) -> UnservedItems:
        longest = max_length if self._planner.by_bucket else None
        return self._reader.read(start.epoch, start.served_up_to, longest, count)

    def _seeds(self, start: Start) -> Sequence[int] | None:
        if self._seed is None:
            return None
        # Counts the items of this epoch only, so that epoch n is the same whatever was served before it.
        return self._seed, start.epoch, start.counts.items - start.epoch_start_counts.items

    def _make_window(
        self, start: Start, unserved: UnservedItems, count: int, plan: Plan, max_length: int | None
    ) -> Window:
        items, served_up_to = unserved.serve(count)
        counts = Counts(
            start.counts.items + count,
            start.counts.tokens + int(plan.lengths.sum()),
            start.counts.batches + len(plan),
        )
        next_start = start._replace(served_up_to=served_up_to, counts=counts)
        ends = self._planner.ends(unserved.lengths[:count], max_length) if self._planner.cuts_items else None
        return Window(start, items, plan, max_length, next_start, ends)
