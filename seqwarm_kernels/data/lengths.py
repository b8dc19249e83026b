"""Lengths as users have them, as an array."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .plan import IntArray


def as_lengths(lengths: Sequence[int] | NDArray[Any]) -> IntArray:
    """(items,) int64, from a sequence, an array or a tensor of ints.

    Raises:
        TypeError: these are no ints.
        ValueError: not one-dimensional, or one is negative.
    """
    array = np.asarray(lengths)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"lengths must be ints, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"lengths must be one-dimensional, got shape {array.shape}")
    array = array.astype(np.int64, copy=False)
    if array.min(initial=0) < 0:
        item = int(np.flatnonzero(array < 0)[0])
        raise ValueError(f"lengths must be at least 0, got {array[item]} for item {item}")
    return array
