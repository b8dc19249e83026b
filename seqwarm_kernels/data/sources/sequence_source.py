"""A source over a sequence: a list, an array or a map-style dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..batch_planning.plan import IntArray
from ..files.lengths import count_length
from .base import PartSource
from .item_tokens import count_tokens

#: Items read at a time. Datasets on disk are faster in blocks. Restoring reads at most this many.
_BLOCK = 256


class SequenceSource(PartSource):
    """The items of a sequence, fully shuffled: a list, an array, or a map-style dataset of Hugging Face or torch.

    Restoring costs the same everywhere. The sequence must not change.

    Args:
        sequence: has `len()` and integer indexing. `__getitems__(indices)` is used if the sequence has it.
        order: the options of `Order`.
    """

    def __init__(self, sequence: Any, **order: Any) -> None:
        super().__init__(**order)
        # Characters of a path would be items. pandas indexes by label: a frame would yield its columns.
        if isinstance(sequence, (str, bytes)) or hasattr(sequence, "iloc"):
            raise TypeError(f"sequence must be indexed by position, got a {type(sequence).__name__}: pass a list")
        self._sequence = sequence
        self._settings = {"length": len(sequence)}
        self._set_parts(len(sequence), _BLOCK)

    def lengths(self, length: Callable[[Any], int] = count_tokens) -> IntArray:
        """The length of each item of all ranks, in the order of the sequence, (items,) int64.

        Every item is read. A column of lengths, if the sequence has one, is faster. `length` returns the number of
        tokens of an item, by default as in `LengthBatchStream`.
        """
        numbers = np.arange(len(self._sequence))
        blocks = (self._read(numbers[first : first + _BLOCK]) for first in range(0, len(numbers), _BLOCK))
        return np.fromiter((count_length(length, item, "length") for items in blocks for item in items), np.int64)

    def _read(self, numbers: IntArray) -> list[Any]:
        if hasattr(self._sequence, "__getitems__"):
            return list(self._sequence.__getitems__(numbers.tolist()))
        return [self._sequence[number] for number in numbers.tolist()]
