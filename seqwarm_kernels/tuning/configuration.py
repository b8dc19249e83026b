"""What a search looks at, and by which rule."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import pairwise
from typing import Any

from ..schedule.scheduler import Pacing, SequenceLengthScheduler, discrete
from ..utils.checks import check_int, check_real
from .trial import Trial

#: Without any given, durations are 1 to 16 times the length of a trial.
DURATIONS = 16

#: In units; up to here a float, as progress bars and figures use, can count them.
_LONGEST_TRIAL = 2**53

#: What np.random.seed takes.
_LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True)
class Configuration:
    """Candidates and rule of `tune_schedule`, which says what each entry means."""

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
        min_seq_lengths: Iterable[int],
        durations: Iterable[int] | None,
        learning_rate_warmup: int,
        multiples: float,
        max_rise: float,
        seed: int,
        pacing: str | Pacing,
        settings: Mapping[str, Any] | None,
        **rest: Any,
    ) -> Configuration:
        """
        Raises:
            TypeError, ValueError: an argument cannot be what it is to be.
        """
        check_int("max_seq_length", max_seq_length, minimum=2)
        check_int("learning_rate_warmup", learning_rate_warmup, minimum=1)
        check_real("multiples", multiples)
        if multiples <= 0:
            raise ValueError(f"multiples must be positive, got {multiples}")
        if _end(multiples, learning_rate_warmup) > _LONGEST_TRIAL:
            raise ValueError(
                f"multiples of learning_rate_warmup must be at most {_LONGEST_TRIAL} units together, "
                f"got {multiples} of {learning_rate_warmup}"
            )
        check_real("max_rise", max_rise)
        if max_rise <= 1:
            raise ValueError(f"max_rise must be above 1, got {max_rise}")
        check_int("seed", seed, minimum=0)
        if seed > _LARGEST_SEED:
            raise ValueError(f"seed must be at most {_LARGEST_SEED}, got {seed}")
        if isinstance(pacing, discrete):
            raise ValueError("pacing must follow the duration, which discrete stages do not")
        lengths = [length for length in _ascending("min_seq_lengths", min_seq_lengths) if length < max_seq_length]
        if not lengths:
            raise ValueError(f"min_seq_lengths must have one below max_seq_length {max_seq_length}")
        if durations is None:
            durations = (_end(multiples, learning_rate_warmup) * factor for factor in range(1, DURATIONS + 1))
        configuration = Configuration(
            max_seq_length=max_seq_length,
            min_seq_lengths=tuple(lengths),
            durations=_ascending("durations", durations),
            learning_rate_warmup=learning_rate_warmup,
            multiples=multiples,
            max_rise=max_rise,
            seed=seed,
            pacing=pacing,
            settings=_plain(settings),
            **rest,
        )
        configuration.scheduler(lengths[0], configuration.durations[0])  # it checks the rest
        return configuration

    @property
    def end(self) -> int:
        """Units of a trial."""
        return _end(self.multiples, self.learning_rate_warmup)

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
        """Plain values, all that decides the outcome of a trial or of the search, the pacing by its name."""
        return {
            "max_seq_length": self.max_seq_length,
            "min_seq_lengths": list(self.min_seq_lengths),
            "durations": list(self.durations),
            "learning_rate_warmup": self.learning_rate_warmup,
            "multiples": self.multiples,
            "step_size": self.step_size,
            "unit": self.unit,
            "pacing": self.scheduler(self.min_seq_lengths[0], self.durations[0]).state_dict()["pacing"],
            "max_rise": self.max_rise,
            "seed": self.seed,
            "settings": dict(self.settings),
        }


def _end(multiples: float, learning_rate_warmup: int) -> int:
    """2.2 times 25 is 55, which in floats it is not."""
    return math.ceil(Fraction(str(multiples)) * learning_rate_warmup)


def _ascending(name: str, values: Iterable[int]) -> tuple[int, ...]:
    if not isinstance(values, Iterable):
        raise TypeError(f"{name} must be an iterable of ints, got {type(values).__name__}")
    values = tuple(values)
    for value in values:
        check_int(f"{name}, each of them,", value, minimum=1)
    if not values or any(before >= after for before, after in pairwise(values)):
        raise ValueError(f"{name} must be numbers from small to large, each once, got {list(values)}")
    return values


def _plain(settings: Mapping[str, Any] | None) -> dict[str, Any]:
    """As JSON gives them back, so that a comparison with what a folder holds is one of like with like."""
    try:
        return json.loads(json.dumps(dict(settings or {}), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"settings must be a mapping of plain JSON values: {error}") from error
