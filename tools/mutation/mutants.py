"""The mutants of a file: the same file with one small change, which some test should notice; and their outcomes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from .cpp_edits import cpp_edits
from .python_edits import python_edits

RECORDS = Path(__file__).parent / "records.jsonl"
SEED = 0
SURVIVED, FAILED, TIMED_OUT, NOT_BUILT = "survived", "failed", "timed out", "not built"


class Mutant(NamedTuple):
    file: str  #: path below the root
    source: str  #: digest of the file without the change
    start: int  #: index of the first character that is replaced
    line: int  #: from 1
    operator: str  #: kind of the change
    code: str  #: the line in which the change begins
    before: str
    after: str

    @property
    def is_compiled(self) -> bool:
        return not self.file.endswith(".py")

    def apply(self, source: str) -> str:
        return source[: self.start] + self.after + source[self.start + len(self.before) :]


class Outcome(NamedTuple):
    result: str  #: a mutant dies if a test fails, or does not end in time; one that is not built does not count
    test: str | None  #: the test that failed
    seconds: float


def digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def shuffled_mutants(root: Path, file: str) -> list[Mutant]:
    """All mutants of a file. The order depends on the file's name and contents only."""
    source = (root / file).read_text()
    lines = source.split("\n")
    mutants = []
    for start, end, operator, after in python_edits(source) if file.endswith(".py") else cpp_edits(source):
        line = source.count("\n", 0, start) + 1
        code = lines[line - 1].strip()
        mutants.append(Mutant(file, digest(source), start, line, operator, code, source[start:end], after))
    mutants.sort()
    random.Random(f"{SEED} {file}").shuffle(mutants)
    return mutants


# ---- the file of outcomes, as JSON lines


def read() -> dict[Mutant, Outcome]:
    """The last outcome of each mutant."""
    outcomes = {}
    for line in RECORDS.read_text().splitlines():
        values = json.loads(line)
        outcome = Outcome(*(values.pop(name) for name in Outcome._fields))
        outcomes[Mutant(**values)] = outcome
    return outcomes


def append(mutant: Mutant, outcome: Outcome) -> None:
    with RECORDS.open("a") as file:
        file.write(_line(mutant, outcome))


def rewrite(outcomes: Mapping[Mutant, Outcome]) -> None:
    RECORDS.write_text("".join(_line(*item) for item in sorted(outcomes.items())))


def _line(mutant: Mutant, outcome: Outcome) -> str:
    return json.dumps({**mutant._asdict(), **outcome._asdict()}, ensure_ascii=False) + "\n"
