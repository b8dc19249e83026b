"""The `Source` protocol, and the base class of this package's sources."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeVar, runtime_checkable

import numpy as np

from ...utils.checks import check_same_configuration
from ..batch_planning.plan import IntArray
from ..files.remote import AnyPath, PathLike, check_location, check_named_once, is_path
from .order import Order
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


class BlockSource(ABC):
    """Base class of sources that read items in blocks. The state is a cursor: epoch, block and position in the block.

    The order depends only on the seed and the epoch. Restoring reads the open block and nothing before it. Only the
    latest iterator is valid.

    Args:
        order: the options of `Order`.

    Attributes:
        epoch: number of the epoch.
        order: the options.
    """

    def __init__(self, **order: Any) -> None:
        self.order = Order(**order)
        self.infinite, self.world_size = self.order.infinite, self.order.world_size  # streams ask every source
        self.epoch = self._items_before_block = 0
        self._block = self._position = 0  # the position counts the items of the block that were yielded
        self._latest_iterator = 0

    @property
    def items(self) -> int:
        """Number of items yielded so far, over all epochs."""
        return self._items_before_block + self._position

    @abstractmethod
    def _blocks(self) -> Iterator[list[Any]]:
        """Yield this epoch's blocks in order, from block `_block` on. The next one is requested when one is done."""

    def __iter__(self) -> Iterator[Any]:
        self._latest_iterator += 1
        return self._rest(self._latest_iterator)

    def _rest(self, iterator: int) -> Iterator[Any]:
        self._check_latest(iterator)
        while True:
            items_before, from_start = self.items, self._block == self._position == 0
            for block in self._blocks():
                self._check_position(block)
                for item in islice(block, self._position, None):
                    self._position += 1  # before the item is yielded: a state is that of the next item
                    yield item
                    if iterator != self._latest_iterator:
                        self._check_latest(iterator)
                self._items_before_block += len(block)
                self._block, self._position = self._block + 1, 0
            self.epoch, self._block = self.epoch + 1, 0
            if not self.infinite:
                return
            if from_start and self.items == items_before:
                raise ValueError(f"{type(self).__name__} must have items to be infinite, got an empty epoch")

    def _check_latest(self, iterator: int) -> None:
        if iterator != self._latest_iterator:
            raise RuntimeError("this iterator is invalid: the source was iterated again or restored in the meantime")

    def _check_position(self, block: list[Any]) -> None:
        if 0 < len(block) < self._position:  # a block whose files were skipped is empty
            raise ValueError(
                f"{type(self).__name__} must have the same items as when the state was taken, after item "
                f"{self._position} of block {self._block}, got {len(block)}"
            )

    def _numbers(self, per_block: int, total: int, *, blocks: int = 1) -> IntArray:
        """Which of `total` parts this rank reads in the open block, and in `blocks` - 1 later ones, in their order."""
        order = self.order
        first = order.rank + self._block * per_block * order.world_size
        positions = np.arange(first, min(total, first + blocks * per_block * order.world_size), order.world_size)
        return permuted(positions, total, order.seed, self.epoch) if order.shuffle else positions

    def _shuffled(self, items: list[Any]) -> list[Any]:
        """The items of the open block in the order of the epoch."""
        order = self.order
        if not order.shuffle:
            return items
        numbers = permutation(len(items), order.seed, self.epoch, order.rank, self._block + 1)
        return [items[number] for number in numbers.tolist()]

    def state_dict(self) -> dict[str, Any]:
        """The cursor and the configuration, as plain values without items."""
        cursor = {"epoch": self.epoch, "block": self._block, "position": self._position, "items": self.items}
        return {**cursor, **self._configuration()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next `iter()`. Nothing is read yet.

        Raises:
            ValueError: the state is of another configuration. The source is unchanged.
        """
        self.check_state_dict(state_dict)
        self._latest_iterator += 1
        self.epoch, self._block, self._position = (state_dict[name] for name in ("epoch", "block", "position"))
        self._items_before_block = state_dict["items"] - self._position

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the error of `load_state_dict` without loading."""
        configuration = self._configuration()
        saved = {name: state_dict[name] for name in configuration if name in state_dict}
        check_same_configuration(saved, configuration)

    def _configuration(self) -> dict[str, Any]:
        """The settings that a loaded state must agree with. Subclasses add theirs."""
        order = self.order
        return {
            "source": type(self).__name__,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "rank": order.rank,
            "world_size": order.world_size,
        }


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
