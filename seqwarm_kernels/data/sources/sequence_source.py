"""Items of what has a length and numbered items: lists, arrays, map-style datasets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .base import BlockSource
from .permutation import shuffled

#: Items read at a time: datasets on a disk are quicker so, and restoring reads at most so many.
_BLOCK = 256


class SequenceSource(BlockSource):
    """The items of a sequence, shuffled as a whole: a list, an array, a map-style dataset of Hugging Face or torch.

    Restoring costs the same for any size and place. The sequence must stay as it is.

    Args:
        sequence: has `len()` and items by number; `__getitems__(numbers)` is used where there is one.
        seed: of the order, with the epoch.
        shuffle: or in the sequence's own order.
        infinite: one epoch after another for ever, each in an order of its own.
        rank, world_size: this process takes every world_size-th item of the epoch's order.
    """

    def __init__(
        self,
        sequence: Any,
        *,
        seed: int = 0,
        shuffle: bool = True,
        infinite: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        super().__init__(seed=seed, shuffle=shuffle, infinite=infinite, rank=rank, world_size=world_size)
        has_both = hasattr(sequence, "__len__") and hasattr(sequence, "__getitem__")
        if not has_both or isinstance(sequence, (str, bytes, Mapping)):
            raise TypeError(
                f"sequence must have len() and items by number, as lists and map-style datasets have, "
                f"got {type(sequence).__name__}"
            )
        self._sequence = sequence

    def _blocks(self) -> Iterator[Sequence[Any]]:
        length = len(self._sequence)
        while True:
            first = self.rank + self._block * _BLOCK * self.world_size
            places = np.arange(first, min(length, first + _BLOCK * self.world_size), self.world_size)
            if not len(places):
                return
            yield self._read(shuffled(places, length, self.seed, self.epoch) if self.shuffle else places)

    def _read(self, places: np.ndarray) -> Sequence[Any]:
        numbers = places.tolist()
        if hasattr(self._sequence, "__getitems__"):
            return self._sequence.__getitems__(numbers)
        return [self._sequence[number] for number in numbers]

    def _configuration(self) -> dict[str, Any]:
        return {"length": len(self._sequence)}
