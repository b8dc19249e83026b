"""The candidates and the rule of a search."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from ..schedule.pacing import Pacing, discrete
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import check_int
from .trial import Trial

#: By default, durations are 1 to 16 times the length of a trial.
_DEFAULT_DURATIONS = 16


@dataclass(frozen=True)
class SearchConfiguration:
    """The candidates and the rule of a search. `tune_schedule` documents each field."""

    max_seq_length: int
    min_seq_lengths: tuple[int, ...]
    durations: tuple[int, ...]
    learning_rate_warmup: int
    multiples: float
    step_size: int
    unit: str
    pacing: str | Pacing
    max_rise: float
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def checked(
        *,
        max_seq_length: int,
        learning_rate_warmup: int,
        min_seq_lengths: Iterable[int],
        durations: Iterable[int] | None,
        multiples: float,
        max_rise: float,
        step_size: int,
        unit: str,
        pacing: str | Pacing,
        seed: int,
        settings: Mapping[str, Any] | None,
    ) -> SearchConfiguration:
        """A configuration of the arguments of `tune_schedule`, in plain Python numbers.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an argument is out of range.
        """
        if not max_rise > 1:
            raise ValueError(f"max_rise must be above 1, got {max_rise}")
        if isinstance(pacing, discrete):
            raise ValueError("pacing must scale with the duration, got discrete, whose stages are fixed")
        learning_rate_warmup = check_int("learning_rate_warmup", learning_rate_warmup)
        end = _end(multiples, learning_rate_warmup)
        if end < 1:
            raise ValueError(f"multiples times learning_rate_warmup must be at least one unit, got {end}")
        if durations is None:
            durations = (end * factor for factor in range(1, _DEFAULT_DURATIONS + 1))
        lengths = [length for length in _ascending("min_seq_lengths", min_seq_lengths) if length < max_seq_length]
        if not lengths:
            raise ValueError(f"min_seq_lengths must have a length below max_seq_length {max_seq_length}")
        configuration = SearchConfiguration(
            max_seq_length=check_int("max_seq_length", max_seq_length),
            min_seq_lengths=tuple(lengths),
            durations=_ascending("durations", durations),
            learning_rate_warmup=learning_rate_warmup,
            multiples=float(multiples),
            max_rise=float(max_rise),
            step_size=check_int("step_size", step_size),
            unit=unit,
            pacing=pacing,
            seed=check_int("seed", seed),
            # As read from JSON, so that they compare equal to settings in a folder.
            settings=json.loads(json.dumps(dict(settings or {}), allow_nan=False)),
        )
        configuration.scheduler(lengths[0], configuration.durations[0])  # checks the rest
        return configuration

    @property
    def end(self) -> int:
        """Number of units in a trial."""
        return _end(self.multiples, self.learning_rate_warmup)

    def rule(self) -> str:
        """The rule by which a trial is stable, as a sentence."""
        return (
            f"Stable: up to {self.end:,} {self.unit}s ({self.multiples:g} times the learning rate's warmup) "
            f"no validation perplexity above {self.max_rise:g} times the best before it."
        )

    def scheduler(self, min_seq_length: int, duration: int) -> SequenceLengthScheduler:
        return SequenceLengthScheduler(
            min_seq_length,
            self.max_seq_length,
            duration=duration,
            step_size=self.step_size,
            pacing=self.pacing,
            unit=self.unit,
        )

    def trial(self, min_seq_length: int, duration: int) -> Trial:
        return Trial(min_seq_length, duration, self.end, self.max_rise)

    def to_json(self) -> dict[str, Any]:
        """Plain values of all fields. The pacing is given by its name."""
        pacing = self.scheduler(self.min_seq_lengths[0], self.durations[0]).state_dict()["pacing"]
        lists = {"min_seq_lengths": list(self.min_seq_lengths), "durations": list(self.durations)}
        return {**vars(self), **lists, "pacing": pacing, "settings": dict(self.settings)}

    def flat(self) -> dict[str, Any]:
        """As `to_json`, with each of the user's settings as an entry, so that an error names the one that differs."""
        values = self.to_json()
        settings = values.pop("settings")
        return {**values, **{f"settings[{name!r}]": value for name, value in settings.items()}}


def _end(multiples: float, learning_rate_warmup: int) -> int:
    """`multiples` times `learning_rate_warmup`, rounded up. Exact, unlike floats, in which 2.2 · 25 is above 55."""
    return math.ceil(Fraction(str(multiples)) * learning_rate_warmup)


def _ascending(name: str, values: Iterable[int]) -> tuple[int, ...]:
    values = tuple(check_int(f"each of {name}", value, minimum=1) for value in values)
    if not values or any(before >= after for before, after in pairwise(values)):
        raise ValueError(f"{name} must be strictly increasing and not empty, got {list(values)}")
    return values
