"""The loops of a disassembled kernel, and the instructions in each."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}  #: each chip's matrix instruction
COPIES = ("LDGSTS", "UTMALDG")  # asynchronous, and in bulk

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);")


@dataclass(frozen=True)
class Loop:
    """An innermost loop with matrix products."""

    products: int
    copies: int  #: asynchronous or bulk
    waits: int  #: for matrix products, on Hopper

    @property
    def is_pipelined(self) -> bool:
        """The next tiles are on their way during the products, and products do not wait for one another."""
        return self.copies > 0 and (self.waits == 0 or self.waits < self.products)


def inner_loops(assembly: str, chip: int) -> list[Loop]:
    instructions = [(int(at, 16), name, rest) for at, name, rest in _INSTRUCTION.findall(assembly)]
    spans = []
    for at, name, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)", rest) if name == "BRA" or name.startswith("BRA.") else None
        if target and int(target[1], 16) < at:
            spans.append((int(target[1], 16), at))
    inner = [
        span
        for span in spans
        if not any(span != other and span[0] <= other[0] <= other[1] <= span[1] for other in spans)
    ]
    loops = []
    for begin, end in inner:
        counts = Counter(
            name.partition(".")[0] + (".DEPBAR" if "DEPBAR" in name else "")
            for at, name, _ in instructions
            if begin <= at <= end
        )
        if counts[MATRIX[chip]]:
            copies = sum(counts[name] for name in COPIES)
            loops.append(Loop(counts[MATRIX[chip]], copies, counts["WARPGROUP.DEPBAR"]))
    return loops
