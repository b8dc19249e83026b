"""The shape of each kernel's tiles, by chip, head_dim and dtype: a table, so that nothing is tuned at run time.

`python -m bench aot` compiles every row and prints registers, spills and shared memory; what a row's comment says
of a measurement was measured on a GPU, everything else is what the compiler reports.
"""

from __future__ import annotations

from typing import NamedTuple


class Tiles(NamedTuple):
    """Queries and keys in a tile, warps of a program, and tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Configuration(NamedTuple):
    forward: Tiles
    backward_query: Tiles
    backward_key: Tiles


#: Chips by compute capability; a chip that is not named takes the row below it.
CHIPS = (80, 90, 100)
BULK_COPIES_FROM = 90

# Ampere's rows stay below 99 KiB of shared memory: chips 8.6, 8.9 and 12.0 have no more and take them too.
_HALF = {
    80: {
        16: Configuration(Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2)),
        32: Configuration(Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 2), Tiles(64, 64, 4, 2)),
        64: Configuration(Tiles(128, 64, 4, 2), Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)),
        128: Configuration(Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2), Tiles(64, 64, 8, 2)),
        256: Configuration(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
    },
    90: {
        16: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
        32: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
        64: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
        128: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 2), Tiles(64, 128, 8, 2)),
        256: Configuration(Tiles(128, 64, 8, 2), Tiles(64, 64, 8, 1), Tiles(64, 64, 8, 1)),
    },
}
_HALF[100] = _HALF[90]

_FLOAT = {
    16: Configuration(Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    32: Configuration(Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    64: Configuration(Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    128: Configuration(Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1), Tiles(64, 32, 8, 1)),
    256: Configuration(Tiles(64, 16, 8, 1), Tiles(64, 16, 8, 1), Tiles(64, 16, 8, 1)),
}


def block_d(head_dim: int) -> int:
    """head_dim rounded up to what a matrix instruction takes: a power of two, 16 or more."""
    return max(16, 1 << (head_dim - 1).bit_length())


def configuration(capability: int, head_dim: int, bytes_per_element: int) -> Configuration:
    """`capability`: 90 for compute capability 9.0."""
    if bytes_per_element == 4:
        return _FLOAT[block_d(head_dim)]
    chip = 80 if capability >= 120 else max(chip for chip in CHIPS if chip <= max(capability, CHIPS[0]))
    return _HALF[chip][block_d(head_dim)]
