"""Statistics: spikes, correlation, a few seeds, and two models on the same items."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .reading import FloatArray

SPIKE = 1.2  #: ratio to the smallest loss before, as in Li, Zhang and He, arXiv 2108.06084


class Correlation(NamedTuple):
    """Pearson's correlation over steps."""

    r: float
    p: float | None  #: two-sided; takes steps as independent, which they are not; None without scipy
    steps: int


class Spread(NamedTuple):
    lowest: float
    median: float
    highest: float


def count_spikes(loss_ratio: FloatArray, threshold: float = SPIKE) -> int:
    """Number of steps whose loss is more than `threshold` times the smallest loss before, or not finite."""
    return int(np.sum(~(loss_ratio <= threshold)))


def correlation(x: FloatArray, y: FloatArray) -> Correlation | None:
    """Correlation over the steps where both are finite. None for fewer than three steps, or if one is constant."""
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
    """The mean and its standard error. The error of a single value is None."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1) / np.sqrt(len(array))) if len(array) > 1 else None


def spread(values: Sequence[float]) -> Spread:
    """Minimum, median and maximum.

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("values must hold at least one number, got none")
    return Spread(min(values), float(np.median(values)), max(values))


def sign_test(first: Sequence[bool], second: Sequence[bool]) -> float:
    """McNemar's exact test: the probability that two equally good models differ at least this much on the same items.

    Raises:
        ValueError: The two have different numbers of items.
    """
    if len(first) != len(second):
        raise ValueError(f"both must have the same items, got {len(first)} and {len(second)}")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    differ = only_first + only_second
    tail = sum(math.comb(differ, count) for count in range(max(only_first, only_second), differ + 1))
    return min(1.0, 2 * tail / 2**differ)
