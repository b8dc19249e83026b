"""One trial: a training that is watched, and broken off when its validation perplexity fluctuates."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from ..schedule.scheduler import SequenceLengthScheduler
from .validation import Validation, checked

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

    @cached_property
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
    def is_over(self) -> bool:
        """Whether nothing that comes can count any more."""
        return self.fluctuates or self.cost >= self.end

    @property
    def is_finished(self) -> bool:
        """Whether it is decided; one that is over may not be, with a single validation."""
        return self.fluctuates or self.is_stable

    @property
    def is_stable(self) -> bool:
        """Not with a single validation, which has none before it to rise above."""
        return self.cost >= self.end and len(self.validations) > 1 and not self.fluctuates

    @property
    def cost(self) -> int:
        """Units trained, as far as they were reported."""
        return self.validations[-1].progress if self.validations else 0

    @property
    def tokens(self) -> int | None:
        """Tokens trained, None where they were not reported."""
        return self.validations[-1].tokens if self.validations else 0

    def then(self, validation: Validation) -> Trial:
        """The trial with one more validation; the same where it was over.

        Raises:
            TypeError, ValueError: it is no Validation, does not go on from the last, or is no perplexity.
        """
        if self.is_over:
            return self
        validation = checked(validation, self.validations[-1] if self.validations else None)
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
        TypeError, ValueError: `run_trial` yields something else, ends before, or validates too seldom for a
            fluctuation to show.
    """
    with _seeded(seed):
        trial = _watch(trial, _started(run_trial, scheduler, trial.end), on_validation)
    if not trial.is_over:
        raise ValueError(
            f"run_trial must train and validate up to {trial.end:,} {scheduler.unit}s, "
            f"but its last validation was at {trial.cost:,}"
        )
    if not trial.is_finished:
        raise ValueError("run_trial must validate at least twice in a trial, or no fluctuation can show")
    return trial


def _started(run_trial: RunTrial, scheduler: SequenceLengthScheduler, end: int) -> Iterator[Validation]:
    validations = run_trial(scheduler, end)
    if not isinstance(validations, Iterable):
        raise TypeError(
            f"run_trial must yield, or return an iterable of, Validation(progress, perplexity), "
            f"got {type(validations).__name__}"
        )
    return iter(validations)


def _watch(trial: Trial, validations: Iterator[Validation], on_validation: Callable[[Trial], None]) -> Trial:
    try:
        for validation in validations:
            trial = trial.then(validation)
            on_validation(trial)
            if trial.is_over:
                break
    finally:
        close = getattr(validations, "close", None)
        if close is not None:
            close()
    return trial


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """So that a trial does not depend on the ones before it, which may have been read from a folder.

    Afterwards the caller's random streams go on where they were; CUDA's only if it was in use before.
    """
    python, numpy = random.getstate(), np.random.get_state()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
