"""Read items and their lengths, starting anywhere in an epoch."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...utils.checks import check_bool, check_count, check_int
from ..batch_planning.plan import IntArray
from ..sources.base import BlockSource, Source
from ..sources.permutation import permutation, permuted

#: Items between two states of a source that are kept. At most this many items are read again to reach any item.
_SPACING = 64

#: Entries of a `SourceReader`'s cursor.
_CURSOR_ENTRIES = ["position", "skip", "source", "starts_epoch"]


class ReadItems(NamedTuple):
    """Items of one epoch, in the order of the epoch."""

    positions: IntArray  #: (items,) int64, increasing, counted from the start of the epoch
    lengths: IntArray  #: (items,) int64, tokens
    items: Sequence[Any]  #: the items, or their indices
    cursor_at: Callable[[int], Any]  #: from the position of an item, or of the item after the last one, to its cursor

    def select(self, chosen: IntArray) -> ReadItems:
        return ReadItems(self.positions[chosen], self.lengths[chosen], select_items(self.items, chosen), self.cursor_at)

    def cursor_after(self, count: int) -> Any:
        """The cursor after the first `count` items, at least one."""
        return self.cursor_at(int(self.positions[count - 1]) + 1)


def select_items(items: Sequence[Any], chosen: IntArray) -> list[Any]:
    if isinstance(items, np.ndarray):
        return items[chosen]
    return [items[index] for index in chosen.tolist()]


class Reader(Protocol):
    """Reads from any cursor of an epoch. Cursors are JSON-able."""

    def begin(self) -> Any:
        """The cursor of the start of the first epoch, or of the next epoch once the previous one is over."""

    def read(self, epoch: int, cursor: Any, count: int | None) -> ReadItems:
        """Up to `count` items, starting at `cursor`; fewer at the end of the epoch; None: all."""

    def position(self, cursor: Any) -> int:
        """The position of `cursor` in its epoch."""

    def check(self, cursor: Any) -> None:
        """Raise TypeError or ValueError if `cursor` is not a cursor of this reader's items."""

    def forget(self) -> None:
        """Drop everything in memory. The next `read` starts again from its cursor."""


class IndexReader:
    """Indices of a data set with known lengths, in the random order of each epoch. A cursor is a position.

    Args:
        seed: seed of the order; None: the order of the data set.
        whole: an epoch is read in one call. Its order is then computed at once, which is faster.
    """

    def __init__(self, lengths: IntArray, seed: int | None, whole: bool) -> None:
        self._lengths = lengths
        self._seed = seed
        self._whole = whole
        self._order_of_epoch: tuple[int, IntArray] | None = None

    def begin(self) -> int:
        return 0

    def read(self, epoch: int, cursor: Any, count: int | None) -> ReadItems:
        total = len(self._lengths)
        positions = np.arange(cursor, total if count is None else min(cursor + count, total))
        indices = self._indices(epoch, positions)
        return ReadItems(positions, self._lengths[indices], indices, int)  # type: ignore[arg-type]  # array as sequence

    def position(self, cursor: Any) -> int:
        return int(cursor)

    def check(self, cursor: Any) -> None:
        check_int("a cursor of state_dict", cursor, minimum=0)
        if cursor > len(self._lengths):
            raise ValueError(f"a cursor of state_dict must be at most {len(self._lengths)}, got {cursor}")

    def forget(self) -> None:
        self._order_of_epoch = None

    def _indices(self, epoch: int, positions: IntArray) -> IntArray:
        if self._seed is None or len(positions) == 0:
            return positions
        if not self._whole:
            return permuted(positions, len(self._lengths), self._seed, epoch)
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            self._order_of_epoch = epoch, permutation(len(self._lengths), self._seed, epoch)
        return self._order_of_epoch[1][positions[0] : positions[-1] + 1]


class SourceReader:
    """Items of a source. The items of the open window are kept in memory.

    A cursor has a state of the source, the number of items to skip from that state, and the position in the epoch.
    With `starts_epoch`, the state was taken before the epoch, perhaps at the end of the previous one.
    """

    def __init__(self, source: Source[Any], length: Callable[[Any], int]) -> None:
        self._source = source
        self._length = length
        self.forget()

    def forget(self) -> None:
        self._epoch: int | None = None  # of the items in memory
        self._iterator: Iterator[Any] = iter(())
        self._items: list[Any] = []  # replaced and never changed, so that readers may keep it without a copy
        self._lengths: IntArray = np.empty(0, np.int64)  # of the items
        self._first = 0  # position of the first item in memory
        self._kept: list[dict[str, Any]] = []  # some of the cursors, by increasing position

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source, "_length": self._length}  # the rest is read again

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget()

    def begin(self) -> dict[str, Any]:
        return {"position": 0, "skip": 0, "starts_epoch": True, "source": self._source.state_dict()}

    def read(self, epoch: int, cursor: Any, count: int | None) -> ReadItems:
        try:
            return self._read(epoch, cursor, count)
        except BaseException:  # a generator that raised yields nothing more, as if it had ended
            self.forget()
            raise

    def _read(self, epoch: int, cursor: Any, count: int | None) -> ReadItems:
        position = cursor["position"]
        if epoch != self._epoch or not self._first <= position <= self._first + len(self._items):
            self._go_to(epoch, cursor)
        self._forget_before(position)
        if count is None or len(self._items) < count:
            items = self._read_items(count)
            lengths = self._checked_lengths(items, position + len(self._items))
            self._items = [*self._items, *items] if self._items else items
            self._lengths = np.append(self._lengths, lengths)
        items = self._items if count is None or len(self._items) <= count else self._items[:count]
        lengths = self._lengths[:count]
        positions = np.arange(position, position + len(lengths))
        return ReadItems(positions, lengths, items, partial(_cursor_at, list(self._kept)))

    def position(self, cursor: Any) -> int:
        return int(cursor["position"])

    def check(self, cursor: Any) -> None:
        if not isinstance(cursor, Mapping) or sorted(cursor) != _CURSOR_ENTRIES:
            raise ValueError(f"a cursor of state_dict must have the entries {_CURSOR_ENTRIES}, got {cursor!r}")
        check_count("position of a cursor", cursor["position"])
        check_count("skip of a cursor", cursor["skip"])
        check_bool("starts_epoch of a cursor", cursor["starts_epoch"])
        if isinstance(self._source, BlockSource):  # other sources check their state when they load it
            self._source.check_state_dict(cursor["source"])

    def _go_to(self, epoch: int, cursor: dict[str, Any]) -> None:
        self._source.load_state_dict(cursor["source"])
        self._iterator = iter(self._source)
        if cursor["starts_epoch"]:
            first = list(itertools.islice(self._iterator, 1))
            # Without a first item, the state was the end of the previous epoch.
            self._iterator = itertools.chain(first, self._iterator) if first else iter(self._source)
        self._epoch, self._first = epoch, cursor["position"]
        self._items, self._lengths, self._kept = [], self._lengths[:0], [cursor]
        skipped = sum(1 for _ in itertools.islice(self._iterator, cursor["skip"]))
        if skipped < cursor["skip"]:
            raise ValueError(
                f"source must yield the same items again: at least {cursor['skip']} items after its state, "
                f"got {skipped}"
            )

    def _read_items(self, count: int | None) -> list[Any]:
        """Read the items after those in memory, up to `count` together; None: all. Keeps cursors on the way."""
        items: list[Any] = []
        first = position = self._first + len(self._items)
        end = math.inf if count is None else self._first + count
        while position < end:
            next_kept = position - position % _SPACING + _SPACING
            items.extend(itertools.islice(self._iterator, int(min(next_kept, end)) - position))
            position = first + len(items)
            if position < min(next_kept, end):  # the epoch has ended
                break
            if position == next_kept:
                state = self._source.state_dict()
                self._kept.append({"position": position, "skip": 0, "starts_epoch": False, "source": state})
        return items

    def _checked_lengths(self, items: list[Any], first_position: int) -> IntArray:
        lengths = list(map(self._length, items))
        try:
            counted = np.fromiter(map(operator.index, lengths), np.int64, len(lengths))
        except TypeError:
            number = next(number for number, length in enumerate(lengths) if not _is_int(length))
            raise TypeError(
                f"length must return an int for each item, got {type(lengths[number]).__name__} for item "
                f"{first_position + number}"
            ) from None
        if (counted < 0).any():
            number = int((counted < 0).argmax())
            raise ValueError(
                f"length must return at least 0 for each item, got {counted[number]} for item {first_position + number}"
            )
        return counted

    def _forget_before(self, position: int) -> None:
        dropped = position - self._first
        self._items, self._lengths = self._items[dropped:], self._lengths[dropped:]
        self._first = position
        not_after = sum(cursor["position"] <= position for cursor in self._kept)
        del self._kept[: not_after - 1]


def _is_int(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return True


def _cursor_at(kept: list[dict[str, Any]], position: int) -> dict[str, Any]:
    nearest = next(cursor for cursor in reversed(kept) if cursor["position"] <= position)
    return {**nearest, "position": position, "skip": nearest["skip"] + position - nearest["position"]}
