"""Why mutants survive, from reasons.jsonl. They count as survivors, also those that no test can tell from the code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from .mutants import Mutant


class Reason(NamedTuple):
    file: str
    code: str  #: the line, without its indentation
    before: str
    after: str
    reason: str


REASONS = [Reason(**json.loads(line)) for line in Path(__file__).with_name("reasons.jsonl").read_text().splitlines()]


def reason_of(mutant: Mutant) -> str | None:
    key = (mutant.file, mutant.code, mutant.before, mutant.after)
    return next((entry.reason for entry in REASONS if entry[:4] == key), None)
