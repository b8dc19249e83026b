"""The result of a search, as a scheduler, a table, JSON and a figure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.figures import write_figure
from .configuration import SearchConfiguration
from .figure import search_figure
from .trial import Trial


@dataclass(frozen=True)
class Search:
    """The trials of a search, also of one that found nothing."""

    configuration: SearchConfiguration
    trials: tuple[Trial, ...]  #: in the order in which they were run
    accepted: Trial | None  #: the stable trial whose schedule was found; None if no trial was stable

    @property
    def cost(self) -> int:
        """Number of units trained in all trials, up to the last validation of each.

        Units that an interrupted trial trained before it was started again do not count.
        """
        return sum(trial.cost for trial in self.trials)

    @property
    def tokens(self) -> int | None:
        """Like `cost`, in tokens; None if tokens were not reported."""
        tokens = [trial.tokens for trial in self.trials]
        return None if None in tokens else sum(count for count in tokens if count is not None)

    def outcome(self) -> str:
        """What was found, as sentences."""
        unit = self.configuration.unit
        if self.accepted is None:
            return (
                "no candidate was stable. A lower learning rate, a longer learning rate warmup, longer durations or a "
                "smaller step_size may help."
            )
        found = (
            f"Found: min_seq_length {self.accepted.min_seq_length}, duration {self.accepted.duration:,} {unit}s, "
            f"in {len(self.trials)} trials of {self.cost:,} {unit}s in total."
        )
        if self.accepted.duration == self.configuration.durations[-1]:
            found += "\nThis is the longest candidate: longer durations may be stable as well."
        return found

    def rows(self) -> list[list[str]]:
        """The table of trials, its head first."""
        rows = [["min length", "duration", "trained to", "largest rise", "verdict"]]
        for trial in self.trials:
            verdict = "stable  <- found" if trial == self.accepted else trial.verdict(None)
            counts = [str(trial.min_seq_length), f"{trial.duration:,}", f"{trial.cost:,}"]
            rows.append([*counts, f"{trial.largest_rise:.2f}", verdict])
        return rows

    def table(self) -> str:
        """All trials, the rule, and the schedule found."""
        widths = (10, 14, 14, 12, 0)
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in self.rows()]
        return "\n".join([*lines, "", self.configuration.rule(), self.outcome()])

    def figure(self, path: str | Path) -> None:
        """Write the validation perplexity of every trial, as a PNG or an SVG by the suffix of `path`.

        Raises:
            ImportError: matplotlib is missing. The message says how to install it.
        """
        write_figure(lambda: search_figure(self.configuration, self.trials, self.accepted), Path(path))

    def to_json(self) -> dict[str, Any]:
        """Plain values: the arguments of the scheduler, the cost of the search, the trials, and the configuration."""
        schedule = None
        if self.accepted is not None:
            schedule = self.configuration.scheduler(self.accepted.min_seq_length, self.accepted.duration).state_dict()
            del schedule["progress"]
        return {
            "schedule": schedule,
            "cost": self.cost,
            "tokens": self.tokens,
            "trials": [trial.to_json() for trial in self.trials],
            "configuration": self.configuration.to_json(),
        }


@dataclass(frozen=True)
class TunedSchedule(Search):
    """The schedule that `tune_schedule` found, and the trials that led to it."""

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


class NoStableSchedule(RuntimeError):
    """Raised if every trial fluctuated. `search` holds the trials; the message has their table."""

    def __init__(self, search: Search) -> None:
        super().__init__(search)
        self.search = search

    def __str__(self) -> str:
        return self.search.table()
