"""A source over a sequence: a list, an array or a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ..batch_planning.plan import IntArray
from ..files.lengths import count_length
from .base import BlockSource
from .item_tokens import count_tokens
from .permutation import permuted

#: Items read at a time. Datasets on disk are faster in blocks. Restoring reads at most this many.
_BLOCK = 256


class SequenceSource(BlockSource):
    """The items of a sequence, fully shuffled: a list, an array, or a map-style dataset of Hugging Face or torch.

    Restoring costs the same at every position and for every size. The sequence must not change.

    Args:
        sequence: has `len()` and integer indexing. `__getitems__(indices)` is used if the sequence has it. Objects of
            pandas are refused: they are indexed by label.
        order: the options of `Order`.

    Raises:
        TypeError: `sequence` does not have `len()` and integer indexing, or a setting has the wrong type.
        ValueError: a setting is out of range.
    """

    def __init__(self, sequence: Any, **order: Any) -> None:
        super().__init__(**order)
        check_has_positions("sequence", sequence)
        has_both = hasattr(sequence, "__len__") and hasattr(sequence, "__getitem__")
        if not has_both or isinstance(sequence, (str, bytes, Mapping)):
            raise TypeError(
                f"sequence must have len() and integer indexing, as lists and map-style datasets have, "
                f"got {type(sequence).__name__}"
            )
        self._sequence = sequence

    def lengths(self, length: Callable[[Any], int] = count_tokens) -> IntArray:
        """The length of each item of all ranks, in the order of the sequence, (items,) int64.

        Every item is read. A column of lengths, if the sequence has one, is faster.

        Args:
            length: returns the number of tokens of an item. Default: as in `LengthBatchStream`.

        Raises:
            TypeError: `length` is not a function, or items are text and have no `length`.
            ValueError: `length` returns something else than a length.
        """
        if not callable(length):
            raise TypeError(f"length must be a function of an item, got {type(length).__name__}")
        blocks = (
            self._read(np.arange(first, min(first + _BLOCK, len(self._sequence))))
            for first in range(0, len(self._sequence), _BLOCK)
        )
        return np.array([count_length(length, item, "length") for block in blocks for item in block], dtype=np.int64)

    def _blocks(self) -> Iterator[list[Any]]:
        order, length = self.order, len(self._sequence)
        stride = _BLOCK * order.world_size
        while (first := order.rank + self._block * stride) < length:
            indices = np.arange(first, min(length, first + stride), order.world_size)
            yield self._read(permuted(indices, length, order.seed, self.epoch) if order.shuffle else indices)

    def _read(self, indices: np.ndarray) -> list[Any]:
        if hasattr(self._sequence, "__getitems__"):
            return list(self._sequence.__getitems__(indices.tolist()))
        return [self._sequence[index] for index in indices.tolist()]

    def _configuration(self) -> dict[str, Any]:
        return {**super()._configuration(), "length": len(self._sequence)}


def check_has_positions(name: str, value: object) -> None:
    """`value` must be indexed by position. A Series or DataFrame of pandas is indexed by label."""
    if hasattr(value, "iloc"):
        raise TypeError(
            f"{name} must be indexed by position, got a {type(value).__name__} of pandas, which is indexed by label: "
            "pass a column as a list, as frame['text'].tolist()"
        )
