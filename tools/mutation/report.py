"""The page of scores and survivors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from .mutants import NOT_BUILT, SURVIVED, Mutant, Outcome
from .targets import TARGETS

PAGE = "tools/mutation/scores.md"

_INTRODUCTION = """\
# Mutants

`make mutate` changes one place of a file at a time: a comparison, a sign, a number, a deleted statement, and so on.
Each mutant runs through tests of its file, without those marked `exhaustive`, until one fails. Native attention is also
built with AMX (emulated), for AVX2, to count work, and with sanitizers. Not all survivors have run through all builds
yet, and two died in the exhaustive test that their record names, which was run by hand. A mutant dies if a test fails
or does not end in time. All others count as survivors, also those that no test can tell from the code. Mutants are
drawn with a fixed seed; annotations, docstrings, messages and raise statements have none. After the tests were thinned,
281 mutants of 71 files were tried anew. Rows of schedules, planning, resizing, the allocator and attention/ have these
only; others have older outcomes beside them. New ones in C++ ran without the builds for AVX2, counts and sanitizers.

`python -m tools.mutation --report` writes this page from `tools/mutation/records.jsonl`. A file that changed after its
mutants were tried keeps its row until `make mutate` runs again. So do the outcomes of lines that a small change left as
they were.
"""


class Reason(NamedTuple):
    """Why a mutant survives. It counts as a survivor also if no test can tell it from the code."""

    file: str
    code: str  #: the line, without its indentation
    before: str
    after: str
    reason: str


REASONS = [Reason(**json.loads(line)) for line in Path(__file__).with_name("reasons.jsonl").read_text().splitlines()]


#: How reasons begin of mutants that change no result.
_SAME_RESULTS = ("Equal", "Equivalent", "Changes speed only", "Takes")


def page(outcomes: Mapping[Mutant, Outcome]) -> str:
    tried = {mutant: outcome for mutant, outcome in outcomes.items() if outcome.result != NOT_BUILT}
    survivors = [mutant for mutant, outcome in tried.items() if outcome.result == SURVIVED]
    same = sum(_reason(mutant).startswith(_SAME_RESULTS) for mutant in survivors)
    share = (len(tried) - len(survivors)) / (len(tried) - same)
    without = (
        f"{same} survivors change no result: they are equal, or change speed or memory. Without them {share:.1%} died."
    )
    return "\n".join([_INTRODUCTION, *_table(tried), "", without, "", "## Survivors", *_survivors(survivors), ""])


def _table(tried: Mapping[Mutant, Outcome]) -> list[str]:
    lines = ["| file | mutants | died | survived | share that died |", "|---|---|---|---|---|"]
    for target in TARGETS:
        lines.append(_row(target.file, [outcome for mutant, outcome in tried.items() if mutant.file == target.file]))
    return [*lines, _row("all", list(tried.values()))]


def _row(name: str, outcomes: list[Outcome]) -> str:
    if not outcomes:
        return f"| `{name}` | | | | not yet measured |"
    survived = sum(outcome.result == SURVIVED for outcome in outcomes)
    died = len(outcomes) - survived
    return f"| `{name}` | {len(outcomes)} | {died} | {survived} | {died / len(outcomes):.1%} |"


def _reason(mutant: Mutant) -> str:
    key = (mutant.file, mutant.code, mutant.before, mutant.after)
    return next((entry.reason for entry in REASONS if entry[:4] == key), "not explained yet")


def _survivors(survivors: Iterable[Mutant]) -> list[str]:
    lines, file = [], ""
    for mutant in sorted(survivors):
        if mutant.file != file:
            file = mutant.file
            lines += ["", f"**{file}**", ""]
        lines.append(f"- line {mutant.line}, `{mutant.code}`: {_change(mutant)}. {_reason(mutant)}")
    return lines


def _change(mutant: Mutant) -> str:
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    return f"{mutant.operator} `{before}` → `{after}`"
