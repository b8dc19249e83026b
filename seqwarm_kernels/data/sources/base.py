"""What this package's sources share: the `Source` protocol, the options of `Order`, and base classes with the state."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import length_hint
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from ...utils.checks import check_int, check_rank, check_same_configuration
from ..batch_planning.plan import IntArray
from ..files.remote import AnyPath, PathLike, check_location, check_named_once, is_path
from ..files.transfers import read_ahead
from .permutation import permutation, permuted

T_co = TypeVar("T_co", covariant=True)


@runtime_checkable
class Source(Protocol[T_co]):
    """A stream of items that can be resumed from a saved state.

    `iter(source)` resumes from the loaded state, or starts an epoch. After the last item of an epoch, the next
    `iter(source)` starts the next epoch. An infinite source never ends. The same state always yields the same items in
    the same order, on every rank.

    `state_dict()` after n items is the position of item n + 1. The state is JSON-able and holds no contents of items.
    Loading a state costs the same at every position. A state may be taken before the first item and between any two
    items.
    """

    def __iter__(self) -> Iterator[T_co]: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


@dataclass
class Order:
    """The order of a source's items, and which of them this process reads.

    Every source of this package takes these as keyword arguments: `SequenceSource(items, seed=3, infinite=True)`.

    Args:
        seed: determines the order, together with the epoch.
        shuffle: False: keep the order of the data.
        infinite: repeat epochs forever, each in its own order. Otherwise each `iter()` yields one epoch.
        rank, world_size: this process reads every world_size-th item of the epoch's order, or every world_size-th part
            of a source that reads in parts: files, row groups, or runs of documents. In a `LengthBatchStream`, leave
            them out: the stream assigns batches to ranks itself.

    Raises:
        TypeError: `seed`, `rank` or `world_size` is not an int.
        ValueError: `seed` is negative, or `rank` is not in [0, world_size).
    """

    seed: int = 0
    shuffle: bool = True
    infinite: bool = False
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_rank(self.rank, self.world_size)
        self.seed = check_int("seed", self.seed, minimum=0)
        self.rank, self.world_size = int(self.rank), int(self.world_size)  # NumPy's ints are not JSON-able


class BlockSource(ABC):
    """Base class of sources that read items in blocks. The state is a cursor: epoch, block and position in the block.

    The order depends only on the seed and the epoch. Restoring reads the open block and nothing before it. Only the
    latest iterator is valid.

    Attributes:
        epoch: number of the epoch.
        order: the options.
    """

    def __init__(self, **order: Any) -> None:
        self.order = Order(**order)
        self._settings: dict[str, Any] = {}  # of a subclass, with which a loaded state must agree
        self.infinite, self.world_size = self.order.infinite, self.order.world_size  # streams ask every source
        self.epoch = self._block = self._latest_iterator = 0
        self._rest: Iterator[Any] = iter(())  # of the open block
        self._position_after_rest = 0  # so that an item is yielded without a step in Python

    @abstractmethod
    def _blocks(self) -> Iterator[list[Any]]:
        """Yield this epoch's blocks in order, from block `_block` on. The next one is requested when one is done."""

    @property
    def _position(self) -> int:
        """Number of items of the open block that were yielded."""
        return self._position_after_rest - length_hint(self._rest)

    def __iter__(self) -> Iterator[Any]:
        self._go_to(self._block, self._position)
        return chain.from_iterable(self._rests(self._latest_iterator))

    def _go_to(self, block: int, position: int) -> None:
        """Continue from here. An older iterator raises an error at its next item."""
        self._latest_iterator += 1
        deque(self._rest, maxlen=0)  # the older iterator has no more items
        self._block, self._position_after_rest = block, position

    def _rests(self, iterator: int) -> Iterator[Iterator[Any]]:
        """What is left of each block."""
        self._check_latest(iterator)
        while True:
            is_empty = self._block == self._position == 0
            for block in self._blocks():
                is_empty = is_empty and not block
                self._rest, self._position_after_rest = iter(block[self._position :]), len(block)
                yield self._rest
                self._check_latest(iterator)
                self._block, self._position_after_rest = self._block + 1, 0
            self.epoch, self._block = self.epoch + 1, 0
            if not self.infinite:
                return
            if is_empty:
                raise ValueError(f"{type(self).__name__} must have items to be infinite, got an empty epoch")

    def _check_latest(self, iterator: int) -> None:
        if iterator != self._latest_iterator:
            raise RuntimeError("this iterator is invalid: the source was iterated again or restored in the meantime")

    def _shuffled(self, items: list[Any]) -> list[Any]:
        """The items of the open block in the order of the epoch."""
        order = self.order
        if not order.shuffle:
            return items
        numbers = permutation(len(items), order.seed, self.epoch, order.rank, self._block + 1)
        return [items[number] for number in numbers.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """The cursor and the configuration, as plain values without items."""
        return {"epoch": self.epoch, "block": self._block, "position": self._position, **self._configuration()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next `iter()`. Nothing is read yet.

        Raises:
            ValueError: the state is of another configuration. The source is unchanged.
        """
        configuration = self._configuration()
        saved = {name: value for name, value in state_dict.items() if name in configuration}
        check_same_configuration(saved, configuration)
        self._go_to(state_dict["block"], state_dict["position"])
        self.epoch = state_dict["epoch"]

    def _configuration(self) -> dict[str, Any]:
        """The settings that a loaded state must agree with."""
        order = {name: value for name, value in vars(self.order).items() if name != "infinite"}
        return {"source": type(self).__name__, **order, **self._settings}


class PartSource(BlockSource):
    """Base class of sources that are divided into parts: items, runs of documents, row groups or files.

    The parts are shuffled, and the items inside each block of parts. A subclass calls `_set_parts`.
    """

    def _set_parts(self, count: int, per_block: int, *, reads_ahead: bool = False) -> None:
        """The number of parts of all ranks, and of a block, and whether a thread reads the next block meanwhile."""
        self._num_parts, self._per_block, self._reads_ahead = count, per_block, reads_ahead

    @abstractmethod
    def _read(self, numbers: IntArray) -> list[Any]:
        """Read the items of a block of parts."""

    def _blocks(self) -> Iterator[list[Any]]:
        read = read_ahead(self._read, self._numbers(), 1) if self._reads_ahead else map(self._read, self._numbers())
        return map(self._shuffled, read)

    def _numbers(self) -> Iterator[IntArray]:
        """The parts of each block that this rank reads."""
        order, total = self.order, self._num_parts
        step = self._per_block * order.world_size
        for first in range(order.rank + self._block * step, total, step):
            positions = np.arange(first, min(total, first + step), order.world_size)
            yield permuted(positions, total, order.seed, self.epoch) if order.shuffle else positions


def check_locations(name: str, values: PathLike | Iterable[PathLike], wanted: str) -> list[AnyPath]:
    """Return one path or several as a list of at least one, without duplicates."""
    paths = [check_location(name, value) for value in ([values] if is_path(values) else values)]  # type: ignore[union-attr]
    if not paths:
        raise ValueError(f"{name} must be {wanted}, got none")
    check_named_once(name, paths, "file or folder")
    return paths


def fingerprint(facts: Sequence[object]) -> str:
    """Hash what is known of each file, without its folder: the files may be moved."""
    return f"{len(facts)} files, {hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
