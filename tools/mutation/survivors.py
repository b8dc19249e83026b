"""Why mutants survive. They count as survivors, also those that no test can tell from the code."""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    file: str
    code: str  #: the line, without its indentation
    before: str
    after: str
    reason: str


REASONS: list[Reason] = []
