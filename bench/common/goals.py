"""Goals: the figures that the project has to reach, beside the measured ones."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from .records import markdown


class Goal(NamedTuple):
    what: str
    goal: float | None
    value: float | None  #: None if there is no measurement
    unit: str = ""
    where: str = ""  #: the case with the worst value, if the goal covers several cases
    at_most: bool = False

    def reached(self) -> bool | None:
        if self.value is None or self.goal is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    def value_text(self) -> str:
        return "not yet measured" if self.value is None else f"{self.value:.4g} {self.unit}".strip()

    def goal_text(self) -> str:
        return "" if self.goal is None else f"{'≤' if self.at_most else '≥'} {self.goal:g} {self.unit}".strip()


def worst(values: Iterable[tuple[float | None, str]]) -> tuple[float | None, str]:
    """The smallest value with its case, without the cases that have no value."""
    return min(((value, case) for value, case in values if value is not None), default=(None, ""))


def goals_table(goals: Iterable[Goal]) -> str:
    """A Markdown table with a row for each goal."""
    words = {True: "yes", False: "no", None: ""}
    rows = ([each.what, each.value_text(), each.goal_text(), words[each.reached()], each.where] for each in goals)
    return markdown(["what", "measured", "goal", "reached", "where"], rows)
