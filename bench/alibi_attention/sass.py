"""The loops of a disassembled kernel, and the instructions in each."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}  #: each chip's matrix instruction
COPIES = ("LDGSTS", "UTMALDG")  # asynchronous, and in bulk

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(WARPGROUP\.DEPBAR|[A-Z]\w*)([^;]*);")


@dataclass(frozen=True)
class Loop:
    """An innermost loop with matrix products."""

    instructions: int
    products: int
    copies: int  #: asynchronous or bulk
    waits: int  #: for matrix products, on Hopper

    @property
    def is_pipelined(self) -> bool:
        """The next tiles are on their way during the products, and products do not wait for one another."""
        return self.copies > 0 and self.waits < self.products


def inner_loops(assembly: str, chip: int) -> list[Loop]:
    """The loops with matrix products that hold no other such loop. Loops that only wait do not count."""
    instructions = [(int(at, 16), *rest) for at, *rest in _INSTRUCTION.findall(_main_part(assembly))]
    loops = {}
    for at, name, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)", operands) if name == "BRA" else None
        if target and (begin := int(target[1], 16)) < at:
            counts = Counter(name for place, name, _ in instructions if begin <= place <= at)
            if counts[MATRIX[chip]]:
                copies = sum(counts[name] for name in COPIES)
                loops[begin, at] = Loop(counts.total(), counts[MATRIX[chip]], copies, counts["WARPGROUP.DEPBAR"])
    return [loop for span, loop in loops.items() if not any(_holds(span, other) for other in loops)]


def _main_part(assembly: str) -> str:
    """Up to the exit. Rarely taken branches follow, which jump back into loops."""
    return re.split(r"\*/\s+EXIT ;", assembly)[0]


def _holds(span: tuple[int, int], other: tuple[int, int]) -> bool:
    return span != other and span[0] <= other[0] and other[1] <= span[1]
