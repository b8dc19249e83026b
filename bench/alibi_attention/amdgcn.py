"""What a kernel compiled for AMD's chips needs, read from its assembly."""

from __future__ import annotations

import re
from dataclasses import dataclass

MATRIX = "v_mfma"


@dataclass(frozen=True)
class Assembly:
    registers: int  #: of a thread, those of matrix instructions among them
    spilled_bytes: int  #: of vector registers. Spilled scalars go to lanes of vector registers
    matrix: int
    wide_loads: int  #: of 16 bytes, through buffers
    other_loads: int  #: of tiles: of single 16-bit items, or of 16 bytes through 64-bit addresses


def read(assembly: str) -> Assembly:
    def number(name: str) -> int:
        return int(re.search(rf"\.{name}: +(\d+)", assembly)[1])  # type: ignore[index]

    def count(pattern: str) -> int:
        return len(re.findall(rf"^\s+(?:{pattern})", assembly, re.MULTILINE))

    return Assembly(
        registers=number("vgpr_count"),
        spilled_bytes=max(4 * number("vgpr_spill_count"), number("private_segment_fixed_size")),
        matrix=count(MATRIX),
        wide_loads=count("buffer_load_dwordx4"),
        other_loads=count(r"(?:buffer|global|flat)_load_u?short|(?:global|flat)_load_dwordx4"),
    )
