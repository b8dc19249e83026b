"""Which items of an epoch were served. Short items may be served before long ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..batch_planning.plan import IntArray
from ..batch_planning.planner import BatchPlanner
from .readers import Reader, ReadItems


class ServedUpTo(NamedTuple):
    """Items of at most `bound` tokens, and longer than the previous bound, were served up to `cursor`.

    Bounds increase. Short items are served first, so cursors move back from one bound to the next.
    """

    bound: int
    cursor: Any


class UnservedReader:
    """Reads the items of an epoch that were not served yet.

    Args:
        window: number of items to read at a time; None: all of an epoch.
    """

    def __init__(self, reader: Reader, planner: BatchPlanner, window: int | None) -> None:
        self._reader = reader
        self._planner = planner
        self._window = window

    def begin(self) -> tuple[ServedUpTo, ...]:
        """The start of the next epoch, once the previous one is over. The last bound also applies to longer items."""
        return (ServedUpTo(self._planner.longest or 0, self._reader.begin()),)

    def read(
        self, epoch: int, served: tuple[ServedUpTo, ...], max_length: int | None, count: int | None
    ) -> UnservedItems:
        """The first `count` unserved items of at most `max_length` tokens, fewer at the end of the epoch.

        Args:
            max_length: None: items of any length.
            count: None: all items.
        """
        if max_length is None:
            return UnservedItems(self._reader, served, served[-1].bound, [self._read(epoch, served[0].cursor, count)])
        parts: list[ReadItems] = []
        cursor = _first_unserved(served, max_length)
        while count is None or count > 0:
            read = self._read(epoch, cursor, self._window)
            chosen = np.flatnonzero(_unserved_mask(served, self._reader, read, max_length))[:count]
            parts.append(read.select(chosen))  # `read` itself would keep its other items in memory
            count = None if count is None else count - len(chosen)
            if self._window is None or len(read.lengths) < self._window:
                break
            cursor = read.cursor_after(self._window)
        return UnservedItems(self._reader, served, max_length, parts)

    def shortest(self, epoch: int, served: tuple[ServedUpTo, ...]) -> int | None:
        """Length of the shortest unserved item, at most the last bound; None at the end of the epoch."""
        bound, cursor = served[-1]
        shortest = bound + 1
        while len((read := self._read(epoch, cursor, self._window)).lengths):
            unserved = _unserved_mask(served, self._reader, read, bound)
            shortest = int(np.minimum(read.lengths, bound)[unserved].min(initial=shortest))
            cursor = read.cursor_after(len(read.lengths))
        return shortest if shortest <= bound else None

    def _read(self, epoch: int, cursor: Any, count: int | None) -> ReadItems:
        read = self._reader.read(epoch, cursor, count)
        self._planner.check(read.lengths, self._reader.position(cursor))
        return read


class UnservedItems:
    """Unserved items that may be served now, in the order of their epoch."""

    def __init__(
        self, reader: Reader, served: tuple[ServedUpTo, ...], max_length: int, parts: Sequence[ReadItems]
    ) -> None:
        self._reader = reader
        self._served = served
        self._max_length = max_length
        self._parts = parts
        self.lengths: IntArray = np.concatenate([part.lengths for part in parts])  #: (items,) int64, tokens

    def serve(self, count: int) -> tuple[Sequence[Any], tuple[ServedUpTo, ...]]:
        """The first `count` items, at least one, and which items are served once they are."""
        taken: list[Any] = []
        cursor = None
        for part in self._parts:
            if items := min(count, len(part.lengths)):
                taken.append(part.items[:items] if items < len(part.lengths) else part.items)
                cursor = part.cursor_after(items)
            count -= items
        served = _mark_served(self._served, self._reader, self._max_length, cursor)
        if len(taken) == 1:
            return taken[0], served
        if isinstance(taken[0], np.ndarray):
            return np.concatenate(taken), served  # type: ignore[return-value]
        return list(chain.from_iterable(taken)), served


def _first_unserved(served: Sequence[ServedUpTo], max_length: int) -> Any:
    """The cursor of the first item of at most `max_length` tokens that may be unserved."""
    return next((entry.cursor for entry in served if max_length <= entry.bound), served[-1].cursor)


def _unserved_mask(served: Sequence[ServedUpTo], reader: Reader, read: ReadItems, max_length: int) -> NDArray[np.bool_]:
    """(items,) bool: the unserved items of at most `max_length` tokens."""
    bounds = [entry.bound for entry in served]
    first_positions = np.asarray([reader.position(entry.cursor) for entry in served])
    lengths = np.minimum(read.lengths, bounds[-1])
    return (lengths <= max_length) & (read.positions >= first_positions[np.searchsorted(bounds, lengths)])


def _mark_served(served: Sequence[ServedUpTo], reader: Reader, max_length: int, cursor: Any) -> tuple[ServedUpTo, ...]:
    """`served` once all items of at most `max_length` tokens are served up to `cursor`."""
    marked: list[ServedUpTo] = []
    previous_bound = 0
    for bound, before in served:
        after = cursor if reader.position(before) < reader.position(cursor) else before
        if bound <= max_length:
            marked.append(ServedUpTo(bound, after))
        else:
            if previous_bound < max_length:
                marked.append(ServedUpTo(max_length, after))
            marked.append(ServedUpTo(bound, before))
        previous_bound = bound
    # An entry is redundant if the next one has the same position.
    positions = [reader.position(entry.cursor) for entry in marked]
    last = len(marked) - 1
    return tuple(
        entry for index, entry in enumerate(marked) if index == last or positions[index] != positions[index + 1]
    )
