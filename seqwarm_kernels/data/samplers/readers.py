"""Read items and their lengths, starting anywhere in an epoch."""

from __future__ import annotations

import itertools
import math
import operator
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..batch_planning.plan import IntArray
from ..sources.base import Source
from ..sources.permutation import permutation, permuted
from .state import Cursor

#: Items between two states of a source that are kept. At most this many items are read again to reach any item.
_SPACING = 64


@dataclass
class Items:
    """Some items of one epoch, in the order of the epoch."""

    items: NDArray[Any]  #: (items,) int64, their indices, or the items themselves as objects
    lengths: IntArray  #: (items,) int64, tokens
    positions: IntArray  #: (items,) int64, increasing, counted from the start of the epoch
    source_states: Sequence[tuple[int, Any]] = ()  #: some positions, increasing, and the source's states there

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, chosen: IntArray) -> Items:
        return Items(self.items[chosen], self.lengths[chosen], self.positions[chosen], self.source_states)

    def cursor_after(self, count: int) -> Cursor:
        """The cursor after the first `count` items, at least one."""
        position = int(self.positions[count - 1]) + 1
        if not self.source_states:
            return {"position": position}
        nearest = bisect_right(self.source_states, position, key=operator.itemgetter(0)) - 1
        return {"position": position, "source": self.source_states[nearest][1]}


def joined(parts: list[Items]) -> Items:
    if len(parts) == 1:
        return parts[0]
    return Items(
        np.concatenate([part.items for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.positions for part in parts]),
        [state for part in parts for state in part.source_states],
    )


class IndexReader:
    """Indices of a data set with known lengths, in the random order of each epoch.

    Args:
        seed: seed of the order; None: the order of the data set.
        whole: an epoch is read in one call. Its order is then computed at once, which is faster.
    """

    def __init__(self, lengths: IntArray, seed: int | None, whole: bool) -> None:
        self.num_items: int | None = len(lengths)  #: of an epoch; None: not known
        self._lengths = lengths
        self._seed = seed
        self._whole = whole
        self._order_of_epoch: tuple[int, IntArray] | None = None

    def begin(self) -> Cursor:
        """The cursor of the start of the first epoch, or of the next epoch once the previous one is over."""
        return {"position": 0}

    def read(self, epoch: int, cursor: Cursor, count: int | None) -> Items:
        """Up to `count` items, starting at `cursor`; fewer at the end of the epoch; None: all."""
        begin = cursor["position"]
        size = len(self._lengths)
        positions = np.arange(begin, size if count is None else min(begin + count, size))
        indices = self._indices(epoch, positions)
        return Items(indices, self._lengths[indices], positions)

    def check(self, cursor: Cursor) -> None:
        """Raise ValueError if `cursor` is one of other items. Here the configuration of a state tells that."""

    def _indices(self, epoch: int, positions: IntArray) -> IntArray:
        if self._seed is None or len(positions) == 0:
            return positions
        if not self._whole:
            return permuted(positions, len(self._lengths), self._seed, epoch)
        found = self._order_of_epoch  # a thread of an earlier iterator may replace it
        if found is None or found[0] != epoch:
            found = self._order_of_epoch = epoch, permutation(len(self._lengths), self._seed, epoch)
        return found[1][positions[0] : positions[-1] + 1]


class SourceReader:
    """Items of a source. The items of the open window are kept in memory.

    A cursor has the state of the source before the last item whose position is a multiple of `_SPACING`. That of
    position 0 was taken before the epoch, perhaps at the end of the previous one.
    """

    num_items: int | None = None

    def __init__(self, source: Source[Any], length: Callable[[Any], int]) -> None:
        self._source = source
        self._length = length
        self._lock = threading.RLock()  # a thread of an earlier iterator may still fetch ahead
        self._forget()

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceReader, (self._source, self._length)  # the items are read again

    def begin(self) -> Cursor:
        with self._lock:
            return {"position": 0, "source": self._source.state_dict()}

    def read(self, epoch: int, cursor: Cursor, count: int | None) -> Items:
        with self._lock:
            try:
                return self._read(epoch, cursor, count)
            except BaseException:  # a generator that raised yields nothing more, as if it had ended
                self._forget()
                raise

    def check(self, cursor: Cursor) -> None:
        with self._lock:
            self._forget()
            self._source.load_state_dict(cursor["source"])

    def _forget(self) -> None:
        """The next `read` starts again from its cursor."""
        self._epoch: int | None = None  # of the items in memory
        self._iterator: Iterator[Any] = iter(())
        # Both are replaced and never changed, so that readers may keep them without a copy.
        self._items: NDArray[Any] = np.empty(0, object)
        self._lengths: IntArray = np.empty(0, np.int64)  # of the items
        self._first = 0  # position of the first item in memory
        self._states: list[tuple[int, Any]] = []  # the source's states before some of the items

    def _read(self, epoch: int, cursor: Cursor, count: int | None) -> Items:
        position = cursor["position"]
        if epoch != self._epoch or not self._first <= position <= self._first + len(self._items):
            self._go_to(epoch, cursor)
        self._forget_before(position)
        if count is None or len(self._items) < count:
            items = self._read_items(count)
            lengths = np.fromiter(map(operator.index, map(self._length, items)), np.int64, len(items))
            self._items = np.append(self._items, np.fromiter(items, object, len(items)))
            self._lengths = np.append(self._lengths, lengths)
        lengths = self._lengths[:count]
        positions = np.arange(position, position + len(lengths))
        return Items(self._items[:count], lengths, positions, list(self._states))

    def _go_to(self, epoch: int, cursor: Cursor) -> None:
        self._forget()
        position = cursor["position"]
        self._source.load_state_dict(cursor["source"])
        self._iterator = iter(self._source)
        if position < _SPACING:
            first = list(itertools.islice(self._iterator, 1))
            # Without a first item, the state was the end of the previous epoch.
            self._iterator = itertools.chain(first, self._iterator) if first else iter(self._source)
        skip = position % _SPACING
        skipped = sum(1 for _ in itertools.islice(self._iterator, skip))
        if skipped < skip:
            raise ValueError(f"source must yield the same items again: {skip} after its state, got {skipped}")
        self._epoch, self._first = epoch, position
        self._states = [(position - skip, cursor["source"])]

    def _read_items(self, count: int | None) -> list[Any]:
        """Read the items after those in memory, up to `count` together; None: all. Keeps states on the way."""
        items: list[Any] = []
        first = position = self._first + len(self._items)
        end = math.inf if count is None else self._first + count
        while position < end:
            stop = int(min(position - position % _SPACING + _SPACING, end))
            items.extend(itertools.islice(self._iterator, stop - position))
            position = first + len(items)
            if position < stop:  # the epoch has ended
                break
            if position % _SPACING == 0:
                self._states.append((position, self._source.state_dict()))
        return items

    def _forget_before(self, position: int) -> None:
        dropped = position - self._first
        self._items, self._lengths = self._items[dropped:].copy(), self._lengths[dropped:]
        self._first = position
        not_after = sum(at <= position for at, _ in self._states)
        del self._states[: not_after - 1]


Reader: TypeAlias = IndexReader | SourceReader
