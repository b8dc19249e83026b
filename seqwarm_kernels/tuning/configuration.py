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


@dataclass
class SearchConfiguration:
    """The candidates and the rule of a search, in plain Python numbers. `tune_schedule` documents each field.

    Raises:
        TypeError: a field has the wrong type.
        ValueError: a field is out of range.
    """

    max_seq_length: int
    min_seq_lengths: tuple[int, ...]
    durations: tuple[int, ...]  #: if empty, 1 to 16 times the length of a trial
    learning_rate_warmup: int
    multiples: float
    step_size: int
    unit: str
    pacing: str | Pacing
    max_rise: float
    seed: int
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.max_rise > 1:
            raise ValueError(f"max_rise must be above 1, got {self.max_rise}")
        if isinstance(self.pacing, discrete):
            raise ValueError("pacing must scale with the duration, got discrete, whose stages are fixed")
        for name in ("max_seq_length", "learning_rate_warmup", "step_size", "seed"):
            setattr(self, name, check_int(name, getattr(self, name)))
        self.multiples, self.max_rise = float(self.multiples), float(self.max_rise)
        if self.end < 1:
            raise ValueError(f"multiples times learning_rate_warmup must be at least one unit, got {self.end}")
        lengths = _ascending("min_seq_lengths", self.min_seq_lengths)
        self.min_seq_lengths = tuple(length for length in lengths if length < self.max_seq_length)
        if not self.min_seq_lengths:
            raise ValueError(f"min_seq_lengths must have a length below max_seq_length {self.max_seq_length}")
        multiples_of_end = range(self.end, (_DEFAULT_DURATIONS + 1) * self.end, self.end)
        self.durations = _ascending("durations", self.durations or multiples_of_end)
        # As read from JSON, so that they compare equal to settings in a folder.
        self.settings = json.loads(json.dumps(dict(self.settings), allow_nan=False))
        self.scheduler(self.min_seq_lengths[0], self.durations[0])  # checks the rest

    @property
    def end(self) -> int:
        """Number of units in a trial, rounded up. Exact, unlike floats, in which 2.2 · 25 is above 55."""
        return math.ceil(Fraction(str(self.multiples)) * self.learning_rate_warmup)

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
        return {**vars(self), **lists, "pacing": pacing}

    def flat(self) -> dict[str, Any]:
        """As `to_json`, with each of the user's settings as an entry, so that an error names the one that differs."""
        values = self.to_json()
        settings = values.pop("settings")
        return {**values, **{f"settings[{name!r}]": value for name, value in settings.items()}}


def _ascending(name: str, values: Iterable[int]) -> tuple[int, ...]:
    values = tuple(check_int(f"each of {name}", value, minimum=1) for value in values)
    if not values or any(before >= after for before, after in pairwise(values)):
        raise ValueError(f"{name} must be strictly increasing and not empty, got {list(values)}")
    return values
