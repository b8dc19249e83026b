"""The loops of a disassembled kernel, and the instructions in each."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA", 120: "HMMA"}  #: each chip's matrix instruction
COPIES = ("LDGSTS", "UTMALDG")  # asynchronous, and in bulk
SPILLS = ("STL", "LDL")

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(WARPGROUP\.DEPBAR|[A-Z]\w*)([^;]*);")


@dataclass(frozen=True)
class Loop:
    """An innermost loop with matrix products."""

    instructions: int
    products: int
    copies: int  #: asynchronous or bulk
    waits: int  #: for matrix products, on Hopper
    exponentials: int = 0
    overlapped: int = 0  #: exponentials before which the last wait was for some of the products only, on Hopper
    spills: int = 0  #: instructions that store or load what did not fit into registers

    @property
    def is_pipelined(self) -> bool:
        """The next tiles are on their way during the products, and products do not wait for one another."""
        return self.copies > 0 and self.waits < self.products

    @property
    def is_overlapped(self) -> bool:
        """Most exponentials run beside matrix products, and products do not wait for one another."""
        return 0 < 3 * self.exponentials <= 4 * self.overlapped and self.waits < self.products


_Instruction = tuple[int, str, str]  # address, name, operands


def inner_loops(assembly: str, chip: int) -> list[Loop]:
    """The loops with matrix products that hold no other such loop. Loops that only wait do not count."""
    instructions = [(int(at, 16), *rest) for at, *rest in _INSTRUCTION.findall(_main_part(assembly))]
    loops = {}
    for at, name, operands in instructions:
        target = re.search(r"0x([0-9a-f]+)", operands) if name == "BRA" else None
        if target and (begin := int(target[1], 16)) < at:
            loop = _loop([each for each in instructions if begin <= each[0] <= at], chip)
            if loop.products:
                loops[begin, at] = loop
    return [loop for span, loop in loops.items() if not any(_holds(span, other) for other in loops)]


def _loop(instructions: list[_Instruction], chip: int) -> Loop:
    counts = Counter(name for _, name, _ in instructions)
    exponentials = overlapped = 0
    unfinished = False
    for _, name, operands in instructions:
        if name == "WARPGROUP.DEPBAR":
            unfinished = not operands.endswith(" 0x0 ")
        elif name == "MUFU" and operands.startswith(".EX2"):
            exponentials += 1
            overlapped += unfinished
    return Loop(
        counts.total(),
        counts[MATRIX[chip]],
        sum(counts[name] for name in COPIES),
        counts["WARPGROUP.DEPBAR"],
        exponentials,
        overlapped,
        sum(counts[name] for name in SPILLS),
    )


def _main_part(assembly: str) -> str:
    """Up to the last exit: partitions may have one each. Rarely taken branches follow, which jump back into loops."""
    return "".join(re.split(r"\*/\s+EXIT ;", assembly)[:-1]) or assembly


def _holds(span: tuple[int, int], other: tuple[int, int]) -> bool:
    return span != other and span[0] <= other[0] and other[1] <= span[1]
