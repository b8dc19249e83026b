"""The outcome of each mutant that was tried, as JSON lines."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .mutants import Mutant

RECORDS = Path(__file__).parent / "records.jsonl"

SURVIVED, FAILED, TIMED_OUT, NOT_BUILT = "survived", "failed", "timed out", "not built"


class Outcome(NamedTuple):
    result: str  #: a mutant dies if a test fails, or does not end in time; one that is not built does not count
    test: str | None  #: the test that failed
    seconds: float


def read(path: Path = RECORDS) -> dict[Mutant, Outcome]:
    """The last outcome of each mutant."""
    outcomes = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        values = json.loads(line)
        outcome = Outcome(*(values.pop(name) for name in Outcome._fields))
        outcomes[Mutant(**values)] = outcome
    return outcomes


def append(mutant: Mutant, outcome: Outcome, path: Path = RECORDS) -> None:
    with path.open("a") as file:
        file.write(_line(mutant, outcome))


def rewrite(outcomes: Mapping[Mutant, Outcome], path: Path = RECORDS) -> None:
    path.write_text("".join(_line(*item) for item in sorted(outcomes.items())))


def _line(mutant: Mutant, outcome: Outcome) -> str:
    return json.dumps({**mutant._asdict(), **outcome._asdict()}, ensure_ascii=False) + "\n"
