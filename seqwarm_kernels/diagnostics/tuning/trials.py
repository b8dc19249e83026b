"""One trial: a training that is watched, and broken off when its validation perplexity fluctuates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ...checks import check_int
from ...schedule import SequenceLengthScheduler


class Validation(NamedTuple):
    """What a trial reports when it validates."""

    progress: int  #: units of the schedule trained so far
    perplexity: float  #: on held-out sequences of the full length; inf or nan where training has diverged
    tokens: int | None = None  #: trained so far, if anyone wants to know what the search took


#: Trains from scratch with a scheduler, which it must step, up to so many units; yields as it validates.
RunTrial = Callable[[SequenceLengthScheduler, int], Iterable[Validation]]


@dataclass(frozen=True)
class Trial:
    """A candidate, and how its validation went."""

    min_seq_length: int
    duration: int
    end: int  #: units after which a trial has passed
    max_rise: float  #: more than this over the best perplexity before is a significant fluctuation
    validations: tuple[Validation, ...] = ()

    @property
    def rises(self) -> list[float]:
        """Every perplexity over the smallest before it; 1 for the first, inf for one that is not finite."""
        best, rises = math.inf, []
        for validation in self.validations:
            finite = math.isfinite(validation.perplexity)
            rises.append(validation.perplexity / min(best, validation.perplexity) if finite else math.inf)
            best = min(best, validation.perplexity) if finite else best
        return rises

    @property
    def largest_rise(self) -> float:
        return max(self.rises, default=1.0)

    @property
    def fluctuates(self) -> bool:
        return self.largest_rise > self.max_rise

    @property
    def is_finished(self) -> bool:
        return self.fluctuates or self.cost >= self.end

    @property
    def is_stable(self) -> bool:
        return self.cost >= self.end and not self.fluctuates

    @property
    def cost(self) -> int:
        """Units trained, as far as they were reported."""
        return self.validations[-1].progress if self.validations else 0

    @property
    def tokens(self) -> int | None:
        """Tokens trained, None where they were not reported."""
        return self.validations[-1].tokens if self.validations else 0

    def then(self, validation: Validation) -> Trial:
        """The trial with one more validation.

        Raises:
            TypeError, ValueError: it is no Validation, goes backwards, or is no perplexity.
        """
        if not isinstance(validation, Validation):
            raise TypeError(f"run_trial must yield Validation(progress, perplexity), got {validation!r}")
        check_int("progress of a Validation", validation.progress, minimum=self.cost)
        if validation.perplexity < 1:
            raise ValueError(
                f"perplexity of a Validation must be at least 1 (it is exp of the loss in nats), "
                f"got {validation.perplexity}"
            )
        return replace(self, validations=(*self.validations, validation))

    def to_json(self) -> dict[str, Any]:
        """Plain values. A perplexity that is no finite number is a string, since JSON has none for it."""
        return {
            "min_seq_length": self.min_seq_length,
            "duration": self.duration,
            "outcome": "fluctuates" if self.fluctuates else "stable" if self.is_stable else "unfinished",
            "largest_rise": _for_json(self.largest_rise),
            "validations": [{**each._asdict(), "perplexity": _for_json(each.perplexity)} for each in self.validations],
        }


def _for_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def run(
    trial: Trial,
    run_trial: RunTrial,
    scheduler: SequenceLengthScheduler,
    seed: int,
    on_validation: Callable[[Trial], None],
) -> Trial:
    """Train until the trial has passed or fluctuates, and close the iterator then.

    Raises:
        ValueError: `run_trial` ends before, or validates too seldom for a fluctuation to show.
    """
    _seed_everything(seed)
    validations = iter(run_trial(scheduler, trial.end))
    try:
        for validation in validations:
            trial = trial.then(validation)
            on_validation(trial)
            if trial.is_finished:
                break
    finally:
        close = getattr(validations, "close", None)
        if close is not None:
            close()
    if not trial.is_finished:
        raise ValueError(
            f"run_trial must train and validate up to {trial.end:,} {scheduler.unit}s, "
            f"but its last validation was at {trial.cost:,}"
        )
    if trial.is_stable and len(trial.validations) < 2:
        raise ValueError("run_trial must validate at least twice in a trial, or no fluctuation can show")
    return trial


def _seed_everything(seed: int) -> None:
    """So that a trial does not depend on the ones before it, which may have been read from a folder."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
