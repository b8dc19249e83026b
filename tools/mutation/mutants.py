"""The mutants of a file: the same file with one small change, which some test should notice."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import NamedTuple

from .cpp_edits import cpp_edits
from .python_edits import python_edits

SEED = 0


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
