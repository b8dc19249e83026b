"""The tile sizes of each kernel, by chip, head_dim and dtype. The table replaces tuning at run time.

On 9.0 the fastest tiles hold 64 rows, so that two to four programs share a multiprocessor. Other chips are not yet
measured: each row is the largest tile, with the most tiles in flight, that fits into the chip's shared memory and, up
to head_dim 128, into its registers without a spill. Comments mark the rows where that was not the first choice.
`python -m bench attention_compiled` prints what every row needs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...utils.switches import switch
from .. import backends


class Tiles(NamedTuple):
    """Queries and keys in a tile, warps in a program, and tiles in flight."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


class Configuration(NamedTuple):
    forward: Tiles
    backward_query: Tiles
    backward_key: Tiles


#: NVIDIA's chips by compute capability. Others take the tiles of the next lower entry, and 12.0 those of 8.0.
CHIPS = (80, 90, 100, 120)
#: Those that load tiles by bulk copies. On 12.0 backward would spill up to 2,792 bytes with them.
BULK_COPIES = range(90, 120 if switch("SEQWARM_BULK_COPIES") == "1" else 90)


class Chip(NamedTuple):
    """A GPU, by its compute capability in torch: 90 for NVIDIA's 9.0, and 94 with `is_hip` for AMD's gfx942."""

    capability: int
    is_hip: bool = False

    @property
    def is_hopper(self) -> bool:
        return self == Chip(90)

    @property
    def copies_in_bulk(self) -> bool:
        return not self.is_hip and self.capability in BULK_COPIES


# 16-bit, by chip and head_dim. Those of 9.0 from head_dim 32 on are measured on an H200.
_HALF = {
    # Chips 8.6, 8.9 and 12.0 take these, too: all rows fit into their 99 KiB of shared memory.
    80: {
        16: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
        32: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
        64: Configuration(Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(32, 128, 8, 2)),
        # Twice the columns would spill in each of the three, three stages in backward_query.
        128: Configuration(Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 3)),
        256: Configuration(Tiles(64, 32, 8, 2), Tiles(64, 16, 8, 2), Tiles(32, 32, 8, 2)),
    },
    90: {
        16: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3)),
        32: Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 128, 4, 2)),
        64: Configuration(Tiles(64, 64, 4, 2), Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 3)),
        128: Configuration(Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3)),
        256: Configuration(Tiles(128, 64, 8, 2), Tiles(64, 32, 4, 2), Tiles(32, 64, 8, 2)),
    },
    100: {
        16: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 2)),
        32: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 2)),
        64: Configuration(Tiles(128, 128, 8, 3), Tiles(128, 64, 8, 3), Tiles(32, 128, 8, 2)),
        # forward: 128 keys spill when not causal. backward_query: 64 keys do.
        128: Configuration(Tiles(128, 64, 8, 3), Tiles(128, 32, 8, 3), Tiles(64, 64, 8, 2)),
        256: Configuration(Tiles(128, 64, 8, 2), Tiles(128, 32, 8, 2), Tiles(32, 64, 8, 2)),
    },
}

# The same for AMD's chips, not yet measured. No vector register spills on gfx942, nor on gfx950 at head_dim 64 and 128.
# A program takes at most 64 KiB of shared memory. Nearly all kernels take at most 256 registers: a compute unit runs
# eight warps.
_HALF_HIP = {
    16: Configuration(Tiles(128, 64, 4, 2), Tiles(128, 64, 4, 2), Tiles(32, 64, 4, 2)),
    32: Configuration(Tiles(128, 64, 4, 2), Tiles(128, 32, 4, 2), Tiles(32, 64, 4, 2)),
    64: Configuration(Tiles(128, 64, 4, 2), Tiles(128, 32, 4, 2), Tiles(16, 64, 4, 2)),
    # forward: 64 keys spill on gfx950.
    128: Configuration(Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 1), Tiles(16, 64, 4, 2)),
    256: Configuration(Tiles(64, 32, 8, 2), Tiles(64, 16, 8, 1), Tiles(16, 64, 8, 2)),
}

# The same with a mask or dropout, where other tiles than those of `configuration` are faster on an H200.
_HOPPER_NOT_PLAIN = {128: Configuration(Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2), Tiles(32, 64, 4, 3))}
# The same for backward_key of light calls. In others, 64 queries spill more than 32.
_HOPPER_LIGHT_KEY = {128: Tiles(64, 64, 4, 2)}

# float32 uses no matrix instructions unless torch allows TF32. Small tiles keep compilation quick.
_FLOAT = {
    16: Configuration(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
    32: Configuration(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
    64: Configuration(Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2), Tiles(32, 64, 8, 2)),
    128: Configuration(Tiles(64, 16, 8, 2), Tiles(64, 16, 8, 2), Tiles(16, 64, 8, 2)),
    256: Configuration(Tiles(32, 16, 8, 2), Tiles(32, 16, 8, 2), Tiles(16, 32, 8, 2)),
}
# On AMD's chips the tiles of backward_key would spill.
_FLOAT_HIP = {
    **{head_dim: _FLOAT[head_dim]._replace(backward_key=Tiles(16, 64, 8, 2)) for head_dim in (16, 32, 64, 128)},
    256: _FLOAT[256]._replace(backward_key=Tiles(16, 32, 4, 2)),
}


def block_d(head_dim: int) -> int:
    """head_dim rounded up to a size of matrix instructions: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def chip_of(device: torch.device) -> Chip:
    """The chip of a device. For the interpreter 9.0, which supports every way to load a tile."""
    if device.type == "cpu":
        return Chip(BULK_COPIES.start)
    major, minor = torch.cuda.get_device_capability(device)
    return Chip(10 * major + minor, backends.IS_HIP)


def _entry_of(capability: int) -> int:
    return 80 if capability >= 120 else max(entry for entry in _HALF if entry <= max(capability, 80))


def configuration(chip: Chip, head_dim: int, bytes_per_element: int, *, plain: bool, light: bool) -> Configuration:
    """The tiles of all kernels for calls with these options.

    Args:
        chip: that compiles and runs them.
        head_dim: 1 to 256.
        bytes_per_element: 2 or 4.
        plain: without mask, dropout, and keys that no query may see. Each needs registers, so most tiles have half the
            columns with any of them.
        light: plain, without a window, segments or packed sequences, and with bulk copies.
    """
    half = _HALF_HIP if chip.is_hip else _HALF[_entry_of(chip.capability)]
    single = _FLOAT_HIP if chip.is_hip else _FLOAT
    row = (single if bytes_per_element == 4 else half)[block_d(head_dim)]
    hopper = half is _HALF[90] and bytes_per_element == 2
    if hopper and light and block_d(head_dim) in _HOPPER_LIGHT_KEY:
        return row._replace(backward_key=_HOPPER_LIGHT_KEY[block_d(head_dim)])
    if plain:
        return row
    if hopper and block_d(head_dim) in _HOPPER_NOT_PLAIN:
        return _HOPPER_NOT_PLAIN[block_d(head_dim)]
    forward, query, key = row
    return Configuration(
        forward._replace(block_n=max(16, forward.block_n // 2)),
        query._replace(block_n=max(16, query.block_n // 2)),
        key._replace(block_m=max(16, key.block_m // 2)),
    )


class ShortTile(NamedTuple):
    """Tokens in a tile of short rows, warps in a program, and the most registers of a thread (None: no limit)."""

    tokens: int
    num_warps: int
    forward_registers: int | None
    backward_registers: int | None


# 16-bit on 9.0, by head_dim. Registers at 64 and 128 are measured on an H200: few spills cost less than waiting alone.
_SHORT_HALF = {
    16: ShortTile(64, 4, 128, 128),
    32: ShortTile(64, 4, 128, 128),
    64: ShortTile(64, 4, 128, 168),
    128: ShortTile(64, 4, 128, None),
    256: ShortTile(64, 8, None, None),
}

# The same for backward of longer rows, where that is faster than the kernels of any length.
_LONGER_HALF = {64: ShortTile(128, 8, None, None)}


def short_tile(chip: Chip, head_dim: int, bytes_per_element: int) -> ShortTile:
    """The tile of short rows. Chips other than 9.0 are not yet measured; on 8.0, tiles of 64 tokens would spill."""
    if chip.is_hip:
        row_bytes = bytes_per_element * block_d(head_dim)
        return ShortTile(32 if row_bytes <= 256 else 16, 4 if row_bytes <= 512 else 8, None, None)  # others would spill
    entry = _entry_of(chip.capability)
    if bytes_per_element == 2:
        hopper = _SHORT_HALF[block_d(head_dim)]
        return hopper if entry == 90 else ShortTile(64 if entry > 90 else 32, hopper.num_warps, None, None)
    return ShortTile(32 if head_dim <= 64 else 16, 4, None, None)  # without matrix instructions, more would spill


def longer_tile(chip: Chip, head_dim: int, bytes_per_element: int) -> ShortTile | None:
    """The tile of backward for rows that `short_tile` does not hold, or None where there is no larger one."""
    return _LONGER_HALF.get(block_d(head_dim)) if chip.is_hopper and bytes_per_element == 2 else None


class GluonTiles(NamedTuple):
    """Tiles of the Gluon kernels: keys or queries in a tile that a kernel loops over, tiles in flight, and the fewest
    queries from which on the kernels are faster than the others."""

    forward_keys: int
    forward_stages: int
    forward_from: int
    skipping_from: int  # forward of calls that skip keys
    backward_keys: int  # for the gradient of queries
    backward_queries: int  # for the gradients of keys and values
    backward_stages: int
    backward_from: int


#: Tiles in flight in the Gluon kernel of the gradient of queries.
KEY_STAGES, VALUE_STAGES = 3, 2
_SPECIALIZED = switch("SEQWARM_SPECIALIZED") == "1"
_NEVER = 2**31
# By head_dim, measured on an H200. At 64 and with skipped keys, blocks have few tiles, and their ends cost more.
_GLUON = {
    64: GluonTiles(128, 3, 4096, _NEVER, 128, 64, 3, 512),
    128: GluonTiles(128, 2, 1024, 8192, 64, 64, 2, 512),
}


def gluon_tiles(chip: Chip, head_dim: int) -> GluonTiles | None:
    """The tiles of the Gluon kernels, or None where there are none: they are for Hopper."""
    return _GLUON.get(block_d(head_dim)) if chip.is_hopper and _SPECIALIZED else None
