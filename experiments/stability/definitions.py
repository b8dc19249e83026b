"""What trains, spikes and diverges mean, and the statistics by seed. Written before any run.

trains    The final validation loss at the full length is at most 1.1 times the best baseline's: the smallest, over the
          rates of the grid, of the baseline's mean over the seeds, with the same model, batch and number of tokens.
spikes    The number of steps whose training loss is above 1.2 times the smallest training loss of earlier steps, or
          not finite. A run spikes if it has such a step.
diverges  No step after the first tenth of the tokens has a training loss below the smallest of the first tenth, or a
          loss or the final loss is not finite.
unstable  A regime in which, at two neighboring rates of the grid or more, most seeds of the baseline spike or diverge,
          and do not train, while the baseline trains at a lower rate of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..reading import FloatArray
from ..results import TRAINS

CONFIDENCE = 0.95
EARLY = 0.1  #: share of the tokens whose smallest loss a run must beat later


class Interval(NamedTuple):
    value: float
    low: float
    high: float


def loss_ratios(losses: FloatArray) -> FloatArray:
    """Each loss divided by the smallest one before it, at least that of arXiv 2108.06084; 1 at the first step."""
    finite = np.where(np.isfinite(losses), losses, np.inf)
    before = np.minimum.accumulate(np.concatenate([finite[:1], finite[:-1]]))
    return losses / before


def diverges(losses: FloatArray, tokens_before: FloatArray, total_tokens: int, final_loss: float | None) -> bool:
    """`tokens_before`: the tokens trained on before each step."""
    if final_loss is None or not math.isfinite(final_loss) or not np.isfinite(losses).all():
        return True
    is_early = tokens_before < EARLY * total_tokens
    return bool((losses[~is_early] >= losses[is_early].min()).all())


def trains(final_loss: float | None, best_baseline: float | None) -> bool:
    return final_loss is not None and best_baseline is not None and final_loss <= TRAINS * best_baseline


def share(count: int, total: int) -> Interval:
    """Clopper and Pearson's exact interval of a share."""
    from scipy.stats import beta

    tail = (1 - CONFIDENCE) / 2
    low = float(beta.ppf(tail, count, total - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, total - count)) if count < total else 1.0
    return Interval(count / total, low, high)


def paired(baseline: Sequence[bool], other: Sequence[bool]) -> tuple[int, int]:
    """Pairs of the same seed in which only `other`, and in which only `baseline`, is true."""
    pairs = list(zip(baseline, other, strict=True))
    return sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)
