"""Items and their lengths, from any place of an epoch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from ...utils.checks import check_bool, check_int
from ..planning.plan import IntArray
from ..sources.base import BlockSource
from ..sources.permutation import shuffled
from ..sources.source import Source

#: Items between two states that are kept of a source: so many are read again, at most, to get to any item.
_SPACING = 64

#: Entries of a `SourceReader`'s place.
_PLACE = ["fresh", "position", "skip", "source"]


class Chunk(NamedTuple):
    """Items that follow on each other in an epoch."""

    position: int  #: of the first item, counted in its epoch
    lengths: IntArray  #: (items,) int64, tokens
    items: Sequence[Any]  #: the items, or their indices
    place: Callable[[int], Any]  #: of one of the items, or of the one behind them, by its position; JSON-able


class Reader(Protocol):
    """Reads from any place of an epoch."""

    def begin(self) -> Any:
        """Where the next epoch begins, asked for when the one before is over; or the first one."""

    def read(self, epoch: int, place: Any, count: int | None) -> Chunk:
        """Up to `count` items from `place` on, fewer at the end of the epoch; None: all."""

    def position(self, place: Any) -> int:
        """Counted in the epoch."""

    def check(self, place: Any) -> None:
        """Raise TypeError or ValueError unless it is a place of what is read here."""

    def forget(self) -> None:
        """Give up what is in memory: the next `read` begins at its place."""


class IndexReader:
    """Indices of a data set whose lengths are known, in the random order of each epoch. A place is a position.

    Args:
        seed: None: in their own order.
        whole: an epoch is read as a whole, so its order is made at once, which is quicker.
    """

    def __init__(self, lengths: IntArray, seed: int | None, whole: bool) -> None:
        self._lengths = lengths
        self._seed = seed
        self._whole = whole
        self._order_of_epoch: tuple[int, IntArray] | None = None

    def begin(self) -> int:
        return 0

    def read(self, epoch: int, place: Any, count: int | None) -> Chunk:
        total = len(self._lengths)
        indices = self._indices(epoch, place, total if count is None else min(place + count, total))
        return Chunk(place, self._lengths[indices], indices, int)  # type: ignore[arg-type]  # an array as a sequence

    def position(self, place: Any) -> int:
        return int(place)

    def check(self, place: Any) -> None:
        check_int("a place of state_dict", place, minimum=0)
        if place > len(self._lengths):
            raise ValueError(f"state_dict must stand among the {len(self._lengths)} items, got place {place}")

    def forget(self) -> None:
        self._order_of_epoch = None

    def _indices(self, epoch: int, begin: int, end: int) -> IntArray:
        if self._seed is None or begin >= end:
            return np.arange(begin, end)
        if not self._whole:
            return shuffled(np.arange(begin, end), len(self._lengths), self._seed, epoch)
        if self._order_of_epoch is None or self._order_of_epoch[0] != epoch:
            # RandomState's streams are frozen, so a state outlives an upgrade of NumPy.
            bits = np.random.MT19937(np.random.SeedSequence((self._seed, epoch)))
            self._order_of_epoch = epoch, np.random.RandomState(bits).permutation(len(self._lengths))
        return self._order_of_epoch[1][begin:end]


class SourceReader:
    """Items of a source, those of the open window in memory.

    A place is a state of the source, how many items to skip from there on, and the position in the epoch. `fresh`: the
    state is that before the epoch's start, perhaps the end of the epoch before.
    """

    def __init__(self, source: Source[Any], length: Callable[[Any], int]) -> None:
        self._source = source
        self._length = length
        self.forget()

    def forget(self) -> None:
        self._epoch: int | None = None  # that of the items in memory
        self._iterator: Iterator[Any] = iter(())
        self._items: list[Any] = []
        self._lengths: list[int] = []
        self._first = 0  # position of the first item in memory
        self._kept: list[dict[str, Any]] = []  # places, some of them, rising

    def __getstate__(self) -> dict[str, Any]:
        return {"_source": self._source, "_length": self._length}  # the rest is read again

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.forget()

    def begin(self) -> dict[str, Any]:
        return {"position": 0, "skip": 0, "fresh": True, "source": self._source.state_dict()}

    def read(self, epoch: int, place: Any, count: int | None) -> Chunk:
        try:
            return self._read(epoch, place, count)
        except BaseException:  # a generator that raised gives nothing more, and would look like one that ended
            self.forget()
            raise

    def _read(self, epoch: int, place: Any, count: int | None) -> Chunk:
        position = place["position"]
        if epoch != self._epoch or not self._first <= position <= self._first + len(self._items):
            self._go_to(epoch, place)
        self._forget_before(position)
        while (count is None or len(self._items) < count) and self._read_some(count):
            pass
        lengths = np.asarray(self._lengths[:count], dtype=np.int64)
        return Chunk(position, lengths, self._items[:count], partial(_place, list(self._kept)))

    def position(self, place: Any) -> int:
        return int(place["position"])

    def check(self, place: Any) -> None:
        if not isinstance(place, Mapping) or sorted(place) != _PLACE:
            raise ValueError(f"a place of state_dict must have the entries {_PLACE}, got {place!r}")
        check_int("position of a place", place["position"], minimum=0)
        check_int("skip of a place", place["skip"], minimum=0)
        check_bool("fresh of a place", place["fresh"])
        if isinstance(self._source, BlockSource):  # others check it when they load it
            self._source.check_state_dict(place["source"])

    def _go_to(self, epoch: int, place: dict[str, Any]) -> None:
        self._source.load_state_dict(place["source"])
        self._iterator = iter(self._source)
        if place["fresh"]:
            first = list(itertools.islice(self._iterator, 1))
            # Without a first item the state was the end of the epoch before.
            self._iterator = itertools.chain(first, self._iterator) if first else iter(self._source)
        self._epoch, self._first = epoch, place["position"]
        self._items, self._lengths, self._kept = [], [], [place]
        skipped = sum(1 for _ in itertools.islice(self._iterator, place["skip"]))
        if skipped < place["skip"]:
            raise ValueError(
                f"source must give the items again that it gave before: {place['skip']} or more from its state on, "
                f"got {skipped}"
            )

    def _read_some(self, count: int | None) -> bool:
        """Up to the next place that is kept; False at the end of the epoch."""
        position = self._first + len(self._items)
        size = _SPACING - position % _SPACING
        size = size if count is None else min(size, count - len(self._items))
        items = list(itertools.islice(self._iterator, size))
        lengths = self._measured(items, position)
        self._items += items
        self._lengths += lengths
        if len(items) < size:
            return False
        if (position + size) % _SPACING == 0:
            state = self._source.state_dict()
            self._kept.append({"position": position + size, "skip": 0, "fresh": False, "source": state})
        return True

    def _measured(self, items: list[Any], position: int) -> list[int]:
        lengths = [self._length(item) for item in items]
        for place, length in enumerate(lengths, start=position):
            if not hasattr(length, "__index__"):
                raise TypeError(f"length must give an int for each item, got {type(length).__name__} for item {place}")
            if length < 0:
                raise ValueError(f"length must give at least 0 for each item, got {length} for item {place}")
        return lengths

    def _forget_before(self, position: int) -> None:
        drop = position - self._first
        del self._items[:drop], self._lengths[:drop]
        self._first = position
        older = sum(place["position"] <= position for place in self._kept)
        del self._kept[: older - 1]


def _place(kept: list[dict[str, Any]], position: int) -> dict[str, Any]:
    before = next(place for place in reversed(kept) if place["position"] <= position)
    return {**before, "position": position, "skip": before["skip"] + position - before["position"]}
