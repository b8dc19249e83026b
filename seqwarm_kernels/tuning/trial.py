"""One trial: a training that is validated, and stopped when its validation perplexity fluctuates."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import check_int, check_real


class Validation(NamedTuple):
    """The result of one validation in a trial."""

    progress: int  #: units of the schedule trained so far; must rise from validation to validation
    perplexity: float  #: on held-out sequences of the full length; inf or nan if training has diverged
    tokens: int | None = None  #: tokens trained so far; optional, only used to report the cost of the search


#: Trains from scratch with a scheduler, which it must step, for a number of units. Yields each validation.
RunTrial = Callable[[SequenceLengthScheduler, int], Iterable[Validation]]


@dataclass(frozen=True)
class Trial:
    """A candidate schedule and its validations.

    Raises:
        TypeError: a number has the wrong type, or `validations` is not a tuple.
        ValueError: a number is out of range.
    """

    min_seq_length: int
    duration: int
    end: int  #: number of units after which a trial is stable if it has not fluctuated
    max_rise: float  #: a perplexity above this times the best earlier one is a significant fluctuation
    validations: tuple[Validation, ...] = ()

    def __post_init__(self) -> None:
        for name in ("min_seq_length", "duration", "end"):
            object.__setattr__(self, name, check_int(name, getattr(self, name), minimum=1))  # the class is frozen
        object.__setattr__(self, "max_rise", check_real("max_rise", self.max_rise))
        if self.max_rise <= 1:
            raise ValueError(f"max_rise must be above 1, got {self.max_rise}")
        validations = self.validations
        if not isinstance(validations, tuple) or not all(isinstance(each, Validation) for each in validations):
            raise TypeError(f"validations must be a tuple of Validation, got {validations!r}")

    @cached_property
    def rises(self) -> list[float]:
        """Each perplexity divided by the smallest one so far, itself included; inf if it is not finite."""
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
        """Whether further validations cannot change the outcome."""
        return self.fluctuates or self.cost >= self.end

    @property
    def is_finished(self) -> bool:
        """Whether the outcome is known. A trial that is over after a single validation has no outcome."""
        return self.fluctuates or self.is_stable

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
        return "found" if self is accepted else "fluctuates" if self.fluctuates else "stable"

    def then(self, validation: Validation) -> Trial:
        """The trial with one more validation; the same trial if it is over.

        Raises:
            TypeError: `validation` is not a Validation of numbers.
            ValueError: its progress does not rise, its tokens fall, or its perplexity is below 1.
        """
        if self.is_over:
            return self
        validation = _checked_validation(validation, self.validations[-1] if self.validations else None)
        return replace(self, validations=(*self.validations, validation))

    def replayed(self, entries: Iterable[Mapping[str, Any]]) -> Trial:
        """The trial with the validations of an earlier one, as `to_json` has them."""
        trial = self
        for entry in entries:
            trial = trial.then(Validation(entry["progress"], float(entry["perplexity"]), entry["tokens"]))
        return trial

    def to_json(self) -> dict[str, Any]:
        """Plain values. A perplexity that is not finite is a string, because JSON cannot represent it as a number."""
        return {
            "min_seq_length": self.min_seq_length,
            "duration": self.duration,
            "outcome": "fluctuates" if self.fluctuates else "stable" if self.is_stable else "unfinished",
            "largest_rise": _for_json(self.largest_rise),
            "validations": [{**each._asdict(), "perplexity": _for_json(each.perplexity)} for each in self.validations],
        }


def _for_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _checked_validation(validation: Any, last: Validation | None) -> Validation:
    """The validation in plain Python numbers, checked against the `last` one of its trial."""
    if not isinstance(validation, Validation):
        raise TypeError(f"run_trial must yield Validation(progress, perplexity), got {validation!r}")
    progress = _count("progress", validation.progress)
    if last is not None and progress <= last.progress:
        raise ValueError(
            f"progress of a Validation must rise from validation to validation, got {progress} after "
            f"{last.progress}; was the scheduler stepped?"
        )
    tokens = None if validation.tokens is None else _count("tokens", validation.tokens)
    if tokens is not None and last is not None and tokens < (last.tokens or 0):
        raise ValueError(f"tokens of a Validation must not fall, got {tokens} after {last.tokens}")
    return Validation(progress, _perplexity(validation.perplexity), tokens)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):  # check_int names the type
            value = operator.index(value)  # NumPy integers, and tensors with one element
    return check_int(f"{name} of a Validation", value, minimum=0)


def _perplexity(value: Any) -> float:
    perplexity = _as_float(value)
    if perplexity < 1:
        raise ValueError(
            f"perplexity of a Validation must be at least 1 (it is exp of the loss in nats), got {perplexity}"
        )
    return perplexity


def _as_float(value: Any) -> float:
    """A number, NumPy number or tensor with one element, as a float. Refuses strings, which float() would read."""
    if not isinstance(value, (str, bytes, bytearray, bool)):
        with suppress(TypeError, ValueError, RuntimeError):  # the error below names the value
            try:
                return float(value)
            except OverflowError:
                return math.inf
    raise TypeError(f"perplexity of a Validation must be a number, got {value!r}")


def run(
    trial: Trial,
    run_trial: RunTrial,
    scheduler: SequenceLengthScheduler,
    seed: int,
    on_validation: Callable[[Trial], None],
) -> Trial:
    """Train until the trial is over, then close the iterator.

    Raises:
        TypeError: `run_trial` does not return an iterable, or yields something other than a Validation.
        ValueError: `run_trial` yields an invalid Validation, ends early, or validates less than twice.
    """
    with _seeded(seed):
        trial = _validated(trial, _start(run_trial, scheduler, trial.end), on_validation)
    if not trial.is_over:
        raise ValueError(
            f"run_trial must train and validate up to {trial.end:,} {scheduler.unit}s, "
            f"but its last validation was at {trial.cost:,}"
        )
    if not trial.is_finished:
        raise ValueError("run_trial must validate at least twice in a trial: one validation cannot show a fluctuation")
    return trial


def _start(run_trial: RunTrial, scheduler: SequenceLengthScheduler, end: int) -> Iterator[Validation]:
    validations = run_trial(scheduler, end)
    if not isinstance(validations, Iterable):
        raise TypeError(
            f"run_trial must yield, or return an iterable of, Validation(progress, perplexity), "
            f"got {type(validations).__name__}"
        )
    return iter(validations)


def _validated(trial: Trial, validations: Iterator[Validation], on_validation: Callable[[Trial], None]) -> Trial:
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
