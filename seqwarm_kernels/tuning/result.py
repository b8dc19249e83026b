"""The result of a search, as a scheduler, a table, JSON and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import check_path
from .configuration import SearchConfiguration
from .figure import draw
from .trial import Trial


@dataclass(frozen=True)
class TunedSchedule:
    """The schedule that `tune_schedule` found, and the trials that led to it."""

    configuration: SearchConfiguration
    trials: tuple[Trial, ...]  #: in the order in which they were run
    accepted: Trial  #: the stable trial whose schedule was found

    @property
    def min_seq_length(self) -> int:
        return self.accepted.min_seq_length

    @property
    def duration(self) -> int:
        """Number of units until the full length."""
        return self.accepted.duration

    @property
    def is_longest(self) -> bool:
        """Whether the duration is the longest candidate. If so, longer durations may be stable as well."""
        return self.duration == self.configuration.durations[-1]

    def scheduler(self) -> SequenceLengthScheduler:
        """A new scheduler, at progress 0."""
        return self.configuration.scheduler(self.min_seq_length, self.duration)

    @property
    def cost(self) -> int:
        """Number of units trained in all trials, up to the last validation of each.

        Units that an interrupted trial trained before it was started again do not count.
        """
        return sum(trial.cost for trial in self.trials)

    @property
    def tokens(self) -> int | None:
        """Like `cost`, in tokens; None if tokens were not reported."""
        return _tokens(self.trials)

    def table(self) -> str:
        """All trials, the rule, and the schedule found."""
        return f"{table(self.configuration, self.trials, self.accepted)}\n{self.outcome()}"

    def outcome(self) -> str:
        """The schedule found and the cost of the search, as sentences."""
        unit = self.configuration.unit
        found = (
            f"Found: min_seq_length {self.min_seq_length}, duration {self.duration:,} {unit}s, "
            f"in {len(self.trials)} trials of {self.cost:,} {unit}s in total."
        )
        longest = "This is the longest candidate: longer durations may be stable as well." if self.is_longest else ""
        return "\n".join(filter(None, [found, longest]))

    def figure(self, path: str | Path) -> None:
        """Write a PNG with the validation perplexity of every trial.

        Raises:
            ImportError: matplotlib is missing. The message says how to install it.
        """
        draw(self.configuration, self.trials, self.accepted, check_path("path", path))

    def to_json(self) -> dict[str, Any]:
        """Plain values: the arguments of the scheduler, the cost of the search, the trials, and the configuration."""
        schedule = self.scheduler().state_dict()
        del schedule["progress"]
        return {"schedule": schedule, **_search_as_json(self.configuration, self.trials)}


class NoStableSchedule(RuntimeError):
    """Raised if every trial fluctuated. `trials` holds the trials; the message has their table."""

    def __init__(self, configuration: SearchConfiguration, trials: Sequence[Trial]) -> None:
        self.configuration = configuration
        self.trials = tuple(trials)
        super().__init__(f"{self.outcome()}\n\n{table(configuration, trials, None)}")

    def outcome(self) -> str:
        """What may help, as sentences."""
        return (
            "no candidate was stable. A lower learning rate, a longer learning rate warmup, longer durations or a "
            "smaller step_size may help."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which would otherwise pass the message to `__init__`."""
        return type(self), (self.configuration, self.trials)

    def to_json(self) -> dict[str, Any]:
        """Like `TunedSchedule.to_json`, without a schedule."""
        return {"schedule": None, **_search_as_json(self.configuration, self.trials)}

    def figure(self, path: str | Path) -> None:
        """Like `TunedSchedule.figure`."""
        draw(self.configuration, self.trials, None, check_path("path", path))


def table(configuration: SearchConfiguration, trials: Sequence[Trial], accepted: Trial | None) -> str:
    widths = (10, 14, 14, 12, 0)
    head, rows = columns(trials, accepted)
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([*lines, "", configuration.rule()])


def columns(trials: Sequence[Trial], accepted: Trial | None) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Head and rows of the table of trials."""
    rows: list[tuple[str, ...]] = [
        (
            str(trial.min_seq_length),
            f"{trial.duration:,}",
            f"{trial.cost:,}",
            f"{trial.largest_rise:.2f}",
            ("fluctuates" if trial.fluctuates else "stable") + ("  <- found" if trial is accepted else ""),
        )
        for trial in trials
    ]
    return ("min length", "duration", "trained to", "largest rise", "verdict"), rows


def _search_as_json(configuration: SearchConfiguration, trials: Sequence[Trial]) -> dict[str, Any]:
    return {
        "cost": sum(trial.cost for trial in trials),
        "tokens": _tokens(trials),
        "trials": [trial.to_json() for trial in trials],
        "configuration": configuration.to_json(),
    }


def _tokens(trials: Sequence[Trial]) -> int | None:
    tokens = [trial.tokens for trial in trials]
    return None if None in tokens else sum(count for count in tokens if count is not None)
