"""Goals: the figures that the project has to reach, beside the measured ones."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import NamedTuple

from .records import markdown


class Goal(NamedTuple):
    what: str
    goal: float
    value: float | None  #: None if there is no measurement
    unit: str = ""
    where: str = ""  #: the case with the worst value, if the goal covers several cases
    at_most: bool = False

    def value_text(self) -> str:
        return "not yet measured" if self.value is None else f"{self.value:.4g} {self.unit}".strip()

    def row(self) -> list[str]:
        sign, reached = ("≤", operator.le) if self.at_most else ("≥", operator.ge)
        word = "" if self.value is None else "yes" if reached(self.value, self.goal) else "no"
        return [self.what, self.value_text(), f"{sign} {self.goal:g} {self.unit}".strip(), word, self.where]


def worst(values: Iterable[tuple[float | None, str]]) -> tuple[float | None, str]:
    """The smallest value with its case, without the cases that have no value."""
    return min(((value, case) for value, case in values if value is not None), default=(None, ""))


def goals_table(goals: Iterable[Goal]) -> str:
    """A Markdown table with a row for each goal."""
    return markdown(["what", "measured", "goal", "reached", "where"], (goal.row() for goal in goals))
