"""One trial: a training that is validated, and stopped when its validation perplexity fluctuates."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..schedule.scheduler import SequenceLengthScheduler


class Validation(NamedTuple):
    """The result of one validation in a trial."""

    progress: int  #: units of the schedule trained so far; must rise from validation to validation
    perplexity: float  #: on held-out sequences of the full length; inf or nan if training has diverged
    tokens: int | None = None  #: tokens trained so far; optional, only used to report the cost of the search


#: Trains from scratch with a scheduler, which it must step, for a number of units. Yields each validation.
RunTrial = Callable[[SequenceLengthScheduler, int], Iterable[Validation]]


@dataclass(frozen=True)
class Trial:
    """A candidate schedule and its validations."""

    min_seq_length: int
    duration: int
    end: int  #: number of units after which a trial is stable if it has not fluctuated
    max_rise: float  #: a perplexity above this times the best earlier one is a significant fluctuation
    validations: tuple[Validation, ...] = ()

    @cached_property
    def rises(self) -> list[float]:
        """Each perplexity divided by the smallest one so far, itself included; inf if it is not finite."""
        best, rises = math.inf, []
        for _, perplexity, _ in self.validations:
            if math.isfinite(perplexity):
                best = min(best, perplexity)
                rises.append(perplexity / best)
            else:
                rises.append(math.inf)
        return rises

    @property
    def largest_rise(self) -> float:
        return max(self.rises, default=1.0)

    @property
    def fluctuates(self) -> bool:
        return self.largest_rise > self.max_rise

    @property
    def is_over(self) -> bool:
        """Whether further validations cannot change the outcome."""
        return self.fluctuates or self.cost >= self.end

    @property
    def is_stable(self) -> bool:
        """Whether the trial reached its end, with at least two validations and without a fluctuation."""
        return self.cost >= self.end and len(self.validations) > 1 and not self.fluctuates

    @property
    def cost(self) -> int:
        """Units trained up to the last validation."""
        return self.validations[-1].progress if self.validations else 0

    @property
    def tokens(self) -> int | None:
        """Tokens trained up to the last validation; None if they were not reported."""
        return self.validations[-1].tokens if self.validations else 0

    @property
    def label(self) -> str:
        """The candidate in words."""
        return f"from {self.min_seq_length} over {self.duration:,}"

    def verdict(self, accepted: Trial | None) -> str:
        """The outcome in a word. `accepted` is the trial that the search chose, if any."""
        return "found" if self == accepted else "fluctuates" if self.fluctuates else "stable"

    def then(self, validation: Validation) -> Trial:
        """The trial with one more validation, in plain Python numbers; the same trial if it is over.

        Raises:
            ValueError: its progress does not rise, or its perplexity is below 1.
        """
        if self.is_over:
            return self
        progress, perplexity, tokens = Validation(*validation)
        progress, perplexity = operator.index(progress), float(perplexity)
        tokens = None if tokens is None else operator.index(tokens)
        if progress < 0 or (self.validations and progress <= self.cost):
            raise ValueError(
                f"progress of a Validation must rise, got {progress} after {self.cost}; was the scheduler stepped?"
            )
        if perplexity < 1:
            raise ValueError(f"perplexity must be at least 1 (exp of the loss in nats), got {perplexity}")
        return replace(self, validations=(*self.validations, Validation(progress, perplexity, tokens)))

    def check_finished(self) -> None:
        """Raises ValueError if the outcome is open."""
        if not (self.fluctuates or self.is_stable):
            raise ValueError(
                f"run_trial must validate at least twice, up to {self.end:,} units, "
                f"got {len(self.validations)} validations up to {self.cost:,}"
            )

    def replayed(self, entries: Iterable[Mapping[str, Any]]) -> Trial:
        """The trial with the validations of a finished one, as `to_json` has them."""
        trial = self
        for entry in entries:
            trial = trial.then(Validation(entry["progress"], entry["perplexity"], entry["tokens"]))
        trial.check_finished()
        return trial

    def to_json(self) -> dict[str, Any]:
        """Plain values. A perplexity that is not finite is a string, because JSON cannot represent it as a number."""
        return {
            "min_seq_length": self.min_seq_length,
            "duration": self.duration,
            "outcome": "stable" if self.is_stable else "fluctuates",
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
    """Train until the trial is over, then close the iterator.

    Raises:
        ValueError: `run_trial` yields an invalid Validation, ends early, or validates less than twice.
    """
    with _seeded(seed):
        validations = iter(run_trial(scheduler, trial.end))
        try:
            for validation in validations:
                trial = trial.then(validation)
                on_validation(trial)
                if trial.is_over:
                    break
        finally:
            if hasattr(validations, "close"):
                validations.close()
    trial.check_finished()
    return trial


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Seed all random streams, so that a trial does not depend on earlier trials, which may be read from a folder.

    Afterwards the caller's random streams are restored; those of CUDA only if CUDA was initialized before.
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
