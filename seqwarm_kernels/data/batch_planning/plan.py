"""A plan: which tokens of which items make up each batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]

#: Where an item has to end, if the plan leaves its last tokens out.
TRUNCATED = -1


@dataclass(slots=True, order=True, unsafe_hash=True)  # frozen=True would take three times as long to make
class Piece:
    """Tokens `start` to `start + length` of an item. Not a tuple, which tensors and arrays take for several indices."""

    item: Any  #: its index in the data set, or the item itself
    start: int
    length: int  #: tokens
    #: Where the item has to end, or `TRUNCATED`. None: not known.
    item_end: int | None = field(default=None, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:  # takes a third of the time of the default
        return Piece, (self.item, self.start, self.length, self.item_end)


@dataclass(frozen=True)
class Plan:
    """The batches of one window. Piece p holds `lengths[p]` tokens of item `items[p]`, starting at token `starts[p]`.

    Batch b holds the pieces from `begins[b]` to `ends[b]` (exclusive). Its longest piece comes first.
    """

    items: IntArray  #: (pieces,) int64, indices into the planned lengths
    starts: IntArray  #: (pieces,) int64
    lengths: IntArray  #: (pieces,) int64, tokens
    begins: IntArray  #: (batches,) int64
    ends: IntArray  #: (batches,) int64
    padded_tokens: IntArray  #: (batches,) int64, tokens with padding: rows times width, or all tokens if packed

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.begins)

    def batch(self, index: int) -> tuple[IntArray, IntArray, IntArray]:
        """Items, starts and lengths of the pieces of batch `index`, as views."""
        pieces = slice(self.begins[index], self.ends[index])
        return self.items[pieces], self.starts[pieces], self.lengths[pieces]

    def tokens(self) -> IntArray:
        """(batches,) int64, tokens without padding."""
        return sums(self.lengths, self.begins, self.ends)

    def whole_items(self) -> IntArray:
        """(batches,) int64, items that begin in each batch. An item in several pieces counts once."""
        return sums(self.starts == 0, self.begins, self.ends)


def sums(values: NDArray[Any], begins: IntArray, ends: IntArray) -> IntArray:
    """(batches,) int64, the sum of `values` over the pieces of each batch."""
    running = np.append(0, np.cumsum(values, dtype=np.int64))
    return running[ends] - running[begins]


def as_lengths(lengths: Sequence[int] | NDArray[Any]) -> IntArray:
    """A sequence, array or tensor of ints as an array of (items,) int64.

    Raises:
        ValueError: the lengths are not ints of one dimension, or one is negative.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"lengths must be one int for each item, got {array.dtype} of shape {array.shape}")
    array = array.astype(np.int64, copy=False)
    if (array < 0).any():
        raise ValueError(f"lengths must be at least 0, got {array.min()} for item {array.argmin()}")
    return array
