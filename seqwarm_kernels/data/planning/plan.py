"""What a planner decides: which tokens of which items make up which batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


class Piece(NamedTuple):
    """Tokens `start` to `start + length` of an item."""

    item: Any  #: its index in the data set, or the item itself
    start: int
    length: int  #: tokens


@dataclass(frozen=True)
class Plan:
    """The batches of one window. Piece p holds `lengths[p]` tokens of item `items[p]`, from token `starts[p]` on.

    Batch b holds the pieces from `begins[b]` to `ends[b]` (not included), its longest first.
    """

    items: IntArray  #: (pieces,) int64, places in the lengths that were planned
    starts: IntArray  #: (pieces,) int64
    lengths: IntArray  #: (pieces,) int64, tokens
    begins: IntArray  #: (batches,) int64
    ends: IntArray  #: (batches,) int64
    padded_tokens: IntArray  #: (batches,) int64, tokens with padding: rows times the width, or all tokens if packed

    def __len__(self) -> int:
        """How many batches."""
        return len(self.begins)

    def batch(self, index: int) -> tuple[IntArray, IntArray, IntArray]:
        """Items, starts and lengths of the pieces of batch `index`, views."""
        pieces = slice(self.begins[index], self.ends[index])
        return self.items[pieces], self.starts[pieces], self.lengths[pieces]

    def tokens(self) -> IntArray:
        """(batches,) int64, tokens without padding."""
        return self._summed(self.lengths)

    def whole_items(self) -> IntArray:
        """(batches,) int64, items that begin in a batch: those cut to several pieces count once."""
        return self._summed(self.starts == 0)

    @property
    def padding(self) -> float:
        """Share of padding in all tokens of all batches, 0 without any."""
        total = int(self.padded_tokens.sum())
        return 1 - int(self.lengths.sum()) / total if total else 0.0

    def in_order(self, order: IntArray) -> Plan:
        """The same batches, batch `order[b]` in place b."""
        return Plan(
            self.items, self.starts, self.lengths, self.begins[order], self.ends[order], self.padded_tokens[order]
        )

    def _summed(self, values: NDArray[Any]) -> IntArray:
        sums = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(values, out=sums[1:])
        return sums[self.ends] - sums[self.begins]
