"""Windows: the items that are planned together, one window after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..planning.plan import IntArray, Piece, Plan
from ..planning.planner import BatchPlanner
from .fit import filled
from .readers import Chunk, Reader
from .schedule_progress import Counts, Pace
from .served import Front, advanced, earliest, left, shortest_left


class Start(NamedTuple):
    """Where a window begins: all that is needed to form it, and every one after it."""

    epoch: int
    fronts: tuple[Front, ...]
    counts: Counts
    before: Counts  #: those at the beginning of the epoch
    least: int = 0  #: the present length is no shorter, since nothing shorter was left in the epoch


class Window:
    """Batches of some items, and where the next window begins."""

    def __init__(
        self, start: Start, items: Sequence[Any], plan: Plan, max_length: int | None, after: Start, in_pieces: bool
    ) -> None:
        self.start = start
        self.plan = plan
        self.max_length = max_length
        self.after = after
        self.num_items = len(items)
        self._items = items
        self._in_pieces = in_pieces

    def __len__(self) -> int:
        """How many batches."""
        return len(self.plan)

    def batch(self, index: int) -> list[Any]:
        """Items, or pieces of them."""
        chosen, starts, lengths = self.plan.batch(index)
        taken = _taken(self._items, chosen)
        items = taken.tolist() if isinstance(taken, np.ndarray) else list(taken)
        return list(map(Piece, items, starts.tolist(), lengths.tolist())) if self._in_pieces else items

    def counts(self, served: int) -> Counts:
        """After the first `served` batches."""
        items, tokens, batches = self.start.counts
        items_served, tokens_served = self._sums
        return Counts(items + int(items_served[served]), tokens + int(tokens_served[served]), batches + served)

    @cached_property
    def _sums(self) -> tuple[IntArray, IntArray]:
        return np.append(0, np.cumsum(self.plan.whole_items())), np.append(0, np.cumsum(self.plan.tokens()))


class Choice(NamedTuple):
    """Items of one chunk that a window may take."""

    positions: IntArray  #: in the epoch, rising
    lengths: IntArray
    items: Sequence[Any]
    place: Callable[[int], Any]


class WindowMaker:
    """Forms windows of what a reader reads.

    Args:
        window: items that are planned together, at most; None: all of an epoch.
        seed: of the order of batches; None: the longest first.
        world_size: batches in a step, which a scheduler may count.
    """

    def __init__(
        self, reader: Reader, planner: BatchPlanner, window: int | None, seed: int | None, world_size: int
    ) -> None:
        self._reader = reader
        self._planner = planner
        self._window = window
        self._seed = seed
        self._pace = Pace(planner, world_size)
        self._any_length = planner.longest or 0

    def first(self, epoch: int, counts: Counts) -> Start:
        """Where the next epoch begins, once nothing is left of the one before."""
        return Start(epoch, (Front(self._any_length, self._reader.begin()),), counts, before=counts)

    def form(self, start: Start, num_items: int | None = None, max_length: int | None = None) -> Window | None:
        """The window that begins there, None at the end of the epoch.

        Args:
            num_items, max_length: those of the window, if it was formed before.
        """
        if num_items is None:
            max_length = self._present_length(start)
        choices = self._read(start, max_length, self._window if num_items is None else num_items)
        lengths = np.concatenate([choice.lengths for choice in choices])
        if len(lengths) == 0:
            return self._form_longer(start, max_length)
        # Not by what was done before the epoch, so that epoch n is the same however it was come to.
        begun = start.counts.items - start.before.items
        seeds = None if self._seed is None else (self._seed, start.epoch, begun)
        count, plan = num_items, None
        if count is None:
            count = self._pace.items_until_change(start.counts, lengths, max_length)
            if count is None and self._planner.packed and len(lengths) == self._window:
                count, plan = filled(self._planner, lengths, max_length, seeds)
        count = len(lengths) if count is None else count
        if plan is None:
            plan = self._planner.plan(lengths[:count], max_length=max_length, seeds=seeds)
        items, place = _first_items(choices, count)
        reach = max_length if self._planner.by_bucket and max_length is not None else self._any_length
        counts = Counts(
            start.counts.items + count,
            start.counts.tokens + int(plan.lengths.sum()),
            start.counts.batches + len(plan),
        )
        after = start._replace(fronts=advanced(start.fronts, self._reader, reach, place), counts=counts)
        return Window(start, items, plan, max_length, after, in_pieces=self._planner.cuts_items)

    def _present_length(self, start: Start) -> int | None:
        length = self._pace.length(start.counts)
        return length if length is None else max(length, start.least)

    def _read(self, start: Start, max_length: int | None, wanted: int | None) -> list[Choice]:
        """Items that may be served now: `wanted` of them if there are so many."""
        if not self._planner.by_bucket or max_length is None:
            chunk = self._reader.read(start.epoch, start.fronts[0].place, wanted)
            self._planner.check(chunk.lengths, chunk.position)
            positions = np.arange(chunk.position, chunk.position + len(chunk.lengths))
            return [Choice(positions, chunk.lengths, chunk.items, chunk.place)]
        choices: list[Choice] = []
        place = earliest(start.fronts, max_length)
        while wanted is None or wanted > 0:
            chunk = self._reader.read(start.epoch, place, self._window)
            self._planner.check(chunk.lengths, chunk.position)
            chosen = np.flatnonzero(left(start.fronts, self._reader, chunk, max_length))[:wanted]
            choices.append(_chosen(chunk, chosen))  # and not the chunk, whose other items would stay in memory
            wanted = None if wanted is None else wanted - len(chosen)
            if self._window is None or len(chunk.lengths) < self._window:
                break
            place = chunk.place(chunk.position + len(chunk.lengths))
        return choices

    def _form_longer(self, start: Start, max_length: int | None) -> Window | None:
        """When nothing short is left of the epoch: with the next longer ones."""
        if not self._planner.by_bucket or max_length is None:
            return None
        shortest = shortest_left(start.fronts, self._reader, start.epoch, self._window)
        if len(shortest) == 0:
            return None
        return self.form(start._replace(least=self._pace.next_length(int(shortest[0]), self._any_length)))


def _chosen(chunk: Chunk, chosen: IntArray) -> Choice:
    return Choice(chunk.position + chosen, chunk.lengths[chosen], _taken(chunk.items, chosen), chunk.place)


def _taken(items: Sequence[Any], chosen: IntArray) -> Sequence[Any]:
    if isinstance(items, np.ndarray):
        return items[chosen]
    return [items[item] for item in chosen.tolist()]


def _first_items(choices: list[Choice], count: int) -> tuple[Sequence[Any], Any]:
    """The first `count` items, and the place behind the last of them."""
    parts: list[Any] = []
    place = None
    for choice in choices:
        if len(positions := choice.positions[:count]):
            parts.append(choice.items[: len(positions)])
            place = choice.place(int(positions[-1]) + 1)
        count -= len(positions)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts), place  # type: ignore[return-value]
    return [item for part in parts for item in part], place
