"""Lengths as users have them, as an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...utils.checks import check_int
from .plan import IntArray

#: Where sequences begin in a packed batch is int32.
MOST_TOKENS = 2**31 - 1


def check_size(name: str, value: object) -> None:
    """`value` must be an int of at least 1 that a batch can have of anything."""
    check_int(name, value, minimum=1)
    if value > MOST_TOKENS:  # type: ignore[operator]
        raise ValueError(f"{name} must be at most {MOST_TOKENS}, got {value}")


def as_lengths(lengths: Sequence[int] | NDArray[Any]) -> IntArray:
    """(items,) int64, from a sequence, an array or a tensor of ints.

    Raises:
        TypeError: these are no ints.
        ValueError: not one-dimensional, or one is negative or beyond int64.
    """
    try:
        array = np.asarray(lengths)
    except ValueError as error:
        raise ValueError(f"lengths must be one int for each item, got nested ones of several sizes: {error}") from error
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"lengths must be ints, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {array.shape}")
    if array.dtype == np.uint64 and array.max(initial=0) > np.iinfo(np.int64).max:
        raise ValueError(f"lengths must be below 2**63, got {array.max()} for item {array.argmax()}")
    array = array.astype(np.int64, copy=False)
    if array.min(initial=0) < 0:
        item = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"lengths must be at least 0, got {array[item]} for item {item}")
    return array
