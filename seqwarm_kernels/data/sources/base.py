"""What all sources share: items come in blocks, and the state is a place in a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...utils.checks import check_bool, check_int, check_rank, check_same_configuration, check_state_entries

_PLACE = ("epoch", "block", "position", "items")


class BlockSource(ABC):
    """An iterable of items that goes on where it stands, also in another process, by a small state.

    Each `iter()` yields what is left of the present epoch, or goes on for ever if `infinite`. The order depends on the
    seed and the epoch alone. Restoring reads the open block, and nothing before it. One iterator at a time is alive.
    """

    def __init__(self, *, seed: int, shuffle: bool, infinite: bool, rank: int, world_size: int) -> None:
        check_int("seed", seed, minimum=0)
        check_bool("shuffle", shuffle)
        check_bool("infinite", infinite)
        check_rank(rank, world_size)
        self.seed, self.shuffle, self.infinite = seed, shuffle, infinite
        self.rank, self.world_size = rank, world_size
        self.epoch = 0
        self.items = 0  #: handed out so far, over all epochs
        self._block = self._position = 0
        self._turn = 0

    @abstractmethod
    def _blocks(self) -> Iterator[Sequence[Any]]:
        """This epoch's blocks from number `_block` on, in their order; each is asked for when the last is done."""

    @abstractmethod
    def _configuration(self) -> dict[str, Any]:
        """What a state must agree with, beyond what is the same for all."""

    def __iter__(self) -> Iterator[Any]:
        self._turn += 1
        return self._items(self._turn)

    def _items(self, turn: int) -> Iterator[Any]:
        while True:
            before, from_start = self.items, self._block == self._position == 0
            for block in self._blocks():
                self._check_reaches(block)
                while self._position < len(block):
                    self._position += 1
                    self.items += 1
                    yield block[self._position - 1]
                    if turn != self._turn:
                        raise RuntimeError("the source was begun anew or restored meanwhile: this iterator is over")
                self._block, self._position = self._block + 1, 0
            self.epoch, self._block = self.epoch + 1, 0
            if not self.infinite:
                return
            if from_start and self.items == before:
                raise ValueError(f"{type(self).__name__} must hold items to be infinite, this epoch had none")

    def _check_reaches(self, block: Sequence[Any]) -> None:
        if 0 < len(block) < self._position:  # one that was left out since has no items
            raise ValueError(
                f"{type(self).__name__} must hold the items that it held when the state was taken: it stands behind "
                f"item {self._position} of block {self._block}, which has {len(block)}"
            )

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and the configuration that this belongs to: plain values, no items."""
        return {
            "epoch": self.epoch,
            "block": self._block,
            "position": self._position,
            "items": self.items,
            **self._shared_configuration(),
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from there with the next `iter()`; nothing is read yet.

        Raises:
            TypeError, ValueError: entries are missing, unknown, or of another configuration; nothing was changed.
        """
        self.check_state_dict(state_dict)
        self.epoch, self._block, self._position, self.items = (state_dict[name] for name in _PLACE)
        self._turn += 1

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise what `load_state_dict` would raise."""
        check_state_entries(state_dict, self.state_dict())
        configuration = self._shared_configuration()
        check_same_configuration({name: state_dict[name] for name in configuration}, configuration)
        for name in _PLACE:
            check_int(name, state_dict[name], minimum=0)

    def _shared_configuration(self) -> dict[str, Any]:
        return {
            "source": type(self).__name__,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rank": self.rank,
            "world_size": self.world_size,
            **self._configuration(),
        }
