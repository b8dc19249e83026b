"""Plain statistics: of spikes, of correlation, of a few seeds, of two models on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .reading import FloatArray

SPIKE = 1.2  #: a loss this many times the smallest before: Li, Zhang and He, arXiv 2108.06084


class Correlation(NamedTuple):
    """Pearson's, over steps."""

    r: float
    p: float | None  #: two-sided, as if steps were independent, which they are not; None without scipy
    steps: int


class Spread(NamedTuple):
    lowest: float
    median: float
    highest: float


def count_spikes(loss_ratio: FloatArray, threshold: float = SPIKE) -> int:
    """Steps whose loss is more than `threshold` times the smallest before, or not finite."""
    return int(np.sum(~(loss_ratio <= threshold)))


def correlation(x: FloatArray, y: FloatArray) -> Correlation | None:
    """Over the steps where both are finite; None if there are fewer than three, or one never changes."""
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    return Correlation(float(np.corrcoef(x, y)[0, 1]), _p_of(x, y), len(x))


def _p_of(x: FloatArray, y: FloatArray) -> float | None:
    try:
        from scipy.stats import pearsonr
    except ImportError:
        return None
    return float(pearsonr(x, y).pvalue)


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """The mean and its standard error; one value has none."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1) / np.sqrt(len(array))) if len(array) > 1 else None


def spread(values: Sequence[float]) -> Spread:
    """
    Raises:
        ValueError: there are no values.
    """
    if not values:
        raise ValueError("values must hold at least one number, got none")
    return Spread(min(values), float(np.median(values)), max(values))


def sign_test(first: Sequence[bool], second: Sequence[bool]) -> float:
    """McNemar's exact test: how likely two equally good models differ at least this much on the same items.

    Raises:
        ValueError: they are not of the same number of items.
    """
    if len(first) != len(second):
        raise ValueError(f"both must have the same items, got {len(first)} and {len(second)}")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    differ = only_first + only_second
    tail = sum(math.comb(differ, count) for count in range(max(only_first, only_second), differ + 1))
    return min(1.0, 2 * tail / 2**differ)
