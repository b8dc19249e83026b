"""The `Source` protocol, and the base class of this package's sources."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import length_hint
from typing import Any, Protocol, TypeVar, runtime_checkable

from ...utils.checks import (
    check_bool,
    check_count,
    check_int,
    check_rank,
    check_same_configuration,
    check_state_entries,
)

T_co = TypeVar("T_co", covariant=True)

_CURSOR = ("epoch", "block", "position", "items")


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

    Each `iter()` yields the rest of the current epoch, or never ends if `infinite`. The order depends only on the seed
    and the epoch. Restoring reads the open block and nothing before it. Only the latest iterator is valid.
    """

    def __init__(
        self, *, seed: int = 0, shuffle: bool = True, infinite: bool = False, rank: int = 0, world_size: int = 1
    ) -> None:
        seed = check_int("seed", seed, minimum=0)
        check_bool("shuffle", shuffle)
        check_bool("infinite", infinite)
        check_rank(rank, world_size)
        self.seed, self.shuffle, self.infinite = seed, shuffle, infinite
        self.rank, self.world_size = int(rank), int(world_size)  # NumPy's ints are not JSON-able
        self.epoch = 0
        self._latest_iterator = 0
        self._set_position(block=0, position=0, items=0)

    def _set_position(self, block: int, position: int, items: int) -> None:
        self._block = block
        self._rest: Iterator[Any] = iter(())  # of the open block
        # Counted once a block is open, so that each of its items is taken without a step in Python.
        self._position_after_rest, self._items_after_rest = position, items

    @property
    def items(self) -> int:
        """Number of items yielded so far, over all epochs."""
        return self._items_after_rest - length_hint(self._rest)

    @property
    def _position(self) -> int:
        """Number of items of the open block that were yielded."""
        return self._position_after_rest - length_hint(self._rest)

    @abstractmethod
    def _blocks(self) -> Iterator[list[Any]]:
        """Yield this epoch's blocks in order, from block `_block` on. The next one is requested when one is done."""

    def _num_blocks(self) -> int | None:
        """Number of blocks of an epoch; None if it is unknown before the end of the epoch."""
        return None

    @abstractmethod
    def _configuration(self) -> dict[str, Any]:
        """The settings of the subclass that a loaded state must agree with."""

    def __iter__(self) -> Iterator[Any]:
        self._go_to(self._block, self._position, self.items)
        return chain.from_iterable(self._rests(self._latest_iterator))

    def _go_to(self, block: int, position: int, items: int) -> None:
        """Continue from here. An older iterator raises an error at its next item."""
        self._latest_iterator += 1
        deque(self._rest, maxlen=0)
        self._set_position(block, position, items)

    def __getstate__(self) -> dict[str, Any]:
        position = {"_position_after_rest": self._position, "_items_after_rest": self.items}
        return {**vars(self), **position, "_rest": iter(())}  # the items are read again

    def _rests(self, iterator: int) -> Iterator[Iterator[Any]]:
        """Yield the rest of each block."""
        self._check_latest(iterator)
        while True:
            items_before, from_start = self.items, self._block == self._position == 0
            for block in self._blocks():
                self._check_position(block)
                rest = iter(block)
                next(islice(rest, self._position, self._position), None)  # skips the items before the position
                self._items_after_rest = self.items + length_hint(rest)
                self._position_after_rest, self._rest = len(block), rest
                yield rest
                self._check_latest(iterator)
                self._block, self._position_after_rest = self._block + 1, 0
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
                f"{type(self).__name__} must have the same items as when the state was taken: the state is after "
                f"item {self._position} of block {self._block}, which has {len(block)} items"
            )

    def state_dict(self) -> dict[str, Any]:
        """The cursor and the configuration, as plain values without items."""
        return {
            "epoch": self.epoch,
            "block": self._block,
            "position": self._position,
            "items": self.items,
            **self._shared_configuration(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Resume from `state_dict` at the next `iter()`. Nothing is read yet.

        Raises:
            TypeError: `state_dict` is not a mapping, or an entry has the wrong type. The source is unchanged.
            ValueError: Entries are missing or unknown, or the configuration differs. The source is unchanged.
        """
        self.check_state_dict(state_dict)
        self.epoch, *cursor = (int(state_dict[name]) for name in _CURSOR)
        self._go_to(*cursor)

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the errors of `load_state_dict` without loading."""
        check_state_entries(state_dict, self.state_dict())
        configuration = self._shared_configuration()
        check_same_configuration({name: state_dict[name] for name in configuration}, configuration)
        for name in _CURSOR:
            check_count(name, state_dict[name])
        num_blocks = self._num_blocks()
        if num_blocks is not None and state_dict["block"] > num_blocks:
            raise ValueError(f"block of state_dict must be at most {num_blocks}, got {state_dict['block']}")

    def _shared_configuration(self) -> dict[str, Any]:
        return {
            "source": type(self).__name__,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rank": self.rank,
            "world_size": self.world_size,
            **self._configuration(),
        }


def fingerprint(facts: Sequence[object]) -> str:
    """Hash what is known of each file, without its folder: the files may be moved."""
    return f"{len(facts)} files, {hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"
