"""Plain statistics: of spikes, of correlation, of a few seeds, of two models on the same items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .reading import FloatArray

SPIKE = 1.2  #: a loss this many times the smallest before: Li, Zhang and He, arXiv 2108.06084


class Correlation(NamedTuple):
    """Pearson's, over steps."""

    r: float
    p: float  #: two-sided, as if steps were independent, which they are not
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
    from scipy.stats import pearsonr

    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if len(x) < 3 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return None
    found = pearsonr(x, y)
    return Correlation(float(found.statistic), float(found.pvalue), len(x))


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error, of two values at least."""
    array = np.asarray(values, dtype=np.float64)
    return float(array.mean()), float(array.std(ddof=1) / np.sqrt(len(array)))


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
    from scipy.stats import binomtest

    if len(first) != len(second):
        raise ValueError(f"both must have the same items, got {len(first)} and {len(second)}")
    only_first = sum(a and not b for a, b in zip(first, second, strict=True))
    only_second = sum(b and not a for a, b in zip(first, second, strict=True))
    if only_first + only_second == 0:
        return 1.0
    return float(binomtest(only_first, only_first + only_second).pvalue)
