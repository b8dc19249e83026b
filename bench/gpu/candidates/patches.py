"""Candidates: patches of the kernels, each with a header that says what it changes and how much it should win.

The header of NAME.patch is that of an e-mail:

    Subject: backward_key keeps no addresses in registers
    Work: backward
    Cases: dense 64; dense 128
    Compiled: backward_key 64 causal: 209, 0, 488 -> 199, 0, 470
    Predicted: 1.02 to 1.10
    Because: fewer registers and instructions

`Compiled` has registers, spilled bytes and instructions of the shortest inner loop, for sm_90, bfloat16 and Triton
3.7.1, now and with the patch. `Predicted` is the speed of the patched call, relative to today's.
"""

from __future__ import annotations

import email
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...common.records import ROOT

FOLDER = Path(__file__).parent


class Needs(NamedTuple):
    """Of a compiled kernel."""

    registers: int
    spilled_bytes: int
    instructions: int


class Compiled(NamedTuple):
    kernel: str
    head_dim: int
    variant: str
    now: Needs
    changed: Needs


@dataclass(frozen=True)
class Candidate:
    name: str
    subject: str
    work: str  #: what is timed: "forward" or "backward"
    cases: tuple[str, ...]  #: names of `cases.GROUPS`
    compiled: tuple[Compiled, ...]
    low: float  #: the predicted speed, relative to today's
    high: float
    because: str
    diff: str

    def write_tree(self, folder: Path) -> Path:
        """A copy of the package and of bench with the change, in a new `folder`."""
        for name in ("seqwarm_kernels", "bench"):
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
        for path, text in patched(self.diff, folder).items():
            path.write_text(text)
        return folder


def read_candidates() -> list[Candidate]:
    return [_read(path) for path in sorted(FOLDER.glob("*.patch"))]


def _read(path: Path) -> Candidate:
    message = email.message_from_string(path.read_text())
    header = {name: " ".join(value.split()) for name, value in message.items()}
    low, high = map(float, header["Predicted"].split(" to "))
    return Candidate(
        path.stem,
        header["Subject"],
        header["Work"],
        tuple(header["Cases"].split("; ")),
        tuple(map(_compiled, message.get_all("Compiled", []))),
        low,
        high,
        header["Because"],
        str(message.get_payload()),
    )


def _compiled(line: str) -> Compiled:
    what, numbers = line.split(":")
    kernel, head_dim, variant = what.split()
    now, changed = (Needs(*map(int, part.split(","))) for part in numbers.split("->"))
    return Compiled(kernel, int(head_dim), variant, now, changed)


def patched(diff: str, tree: Path) -> dict[Path, str]:
    """The changed files of a unified diff with their new text. A machine with a GPU may have neither git nor patch.

    Raises:
        ValueError: A hunk does not match exactly one place of its file.
    """
    found: dict[Path, str] = {}
    for part in re.split(r"^diff --git .*\n", diff, flags=re.MULTILINE)[1:]:
        head, *hunks = re.split(r"^@@ .*\n", part, flags=re.MULTILINE)
        path = tree / re.findall(r"^\+\+\+ b/(.*)$", head, re.MULTILINE)[0]
        text = path.read_text()
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old, new = ("".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
            if text.count(old) != 1:
                raise ValueError(f"{path.name} must have these lines once, got them {text.count(old)} times:\n{old}")
            text = text.replace(old, new)
        found[path] = text
    return found
