"""A plan: which tokens of which items make up each batch. Also checks of the lengths that are planned."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...utils.checks import check_dense, check_int, check_iterable

IntArray = NDArray[np.int64]

#: Where an item has to end, if the plan leaves its last tokens out.
TRUNCATED = -1

#: Packed batches store the offsets of their sequences as int32.
MAX_TOKENS = 2**31 - 1


@dataclass(slots=True, order=True, unsafe_hash=True)  # frozen=True would take three times as long to make
class Piece:
    """Tokens `start` to `start + length` of an item.

    It can be unpacked into these three. It is not a tuple, which tensors and arrays would take for several indices.
    """

    item: Any  #: its index in the data set, or the item itself
    start: int
    length: int  #: tokens
    #: Where the item has to end, or `TRUNCATED`. None: not known.
    item_end: int | None = field(default=None, compare=False, repr=False)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.item, self.start, self.length))

    def __reduce__(self) -> tuple[Any, ...]:  # takes a third of the time of the default
        return Piece, (self.item, self.start, self.length, self.item_end)

    @classmethod
    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("a Piece is part of an item, not an index: wrap the dataset in PieceDataset, or use Prepare")

    # Lists, datasets of Hugging Face, arrays and tensors call these of an index, and their own errors do not help.
    __index__ = __array__ = __torch_function__ = _refuse


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
        return self._sums(self.lengths)

    def whole_items(self) -> IntArray:
        """(batches,) int64, items that begin in each batch. An item in several pieces counts once."""
        return self._sums(self.starts == 0)

    def in_order(self, order: IntArray) -> Plan:
        """The same batches in another order: batch `order[b]` becomes batch b."""
        return Plan(
            self.items, self.starts, self.lengths, self.begins[order], self.ends[order], self.padded_tokens[order]
        )

    def _sums(self, values: NDArray[Any]) -> IntArray:
        """(batches,) int64, the sum of `values` over the pieces of each batch."""
        sums = np.zeros(len(values) + 1, dtype=np.int64)
        np.cumsum(values, out=sums[1:])
        return sums[self.ends] - sums[self.begins]


def check_size(name: str, value: object) -> int:
    """Return `value` as an int. It must be an int from 1 to `MAX_TOKENS`."""
    if isinstance(value, (int, np.integer)) and value > MAX_TOKENS:  # the limit of check_int is larger
        raise ValueError(f"{name} must be at most {MAX_TOKENS}, got {value}")
    return check_int(name, value, minimum=1)


def as_lengths(lengths: Sequence[int] | NDArray[Any]) -> IntArray:
    """A sequence, array or tensor of ints as an array of (items,) int64.

    Raises:
        TypeError: the lengths are not ints.
        ValueError: the lengths are not one-dimensional, or a length is negative or at least 2**63.
    """
    check_iterable("lengths", lengths, "one int for each item")
    if isinstance(lengths, Tensor):
        check_dense("lengths", lengths)
        if lengths.is_meta:
            raise TypeError("lengths must have values, got a tensor on the meta device")
        if lengths.is_floating_point() or lengths.is_complex():  # NumPy takes no gradients and no bfloat16
            raise TypeError(f"lengths must be ints, got {lengths.dtype}")
        lengths = lengths.numpy(force=True)
    try:
        array = np.asarray(lengths)
    except ValueError as error:
        raise ValueError(f"lengths must be one int for each item, got nested ones of several sizes: {error}") from error
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"lengths must be ints, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {array.shape}")
    if array.dtype == np.uint64 and (array > np.iinfo(np.int64).max).any():
        raise ValueError(f"lengths must be below 2**63, got {array.max()} for item {array.argmax()}")
    array = array.astype(np.int64, copy=False)
    if (array < 0).any():
        item = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"lengths must be at least 0, got {array[item]} for item {item}")
    return array
