"""Compiles every configuration of the attention kernels without a GPU, and prints what each kernel needs.

Triton's package contains the assemblers and a disassembler, so registers, spills, shared memory and instructions are
known without a GPU. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from tqdm import tqdm
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

from seqwarm_kernels.ops.alibi_attention.triton_backward_key import backward_key_kernel
from seqwarm_kernels.ops.alibi_attention.triton_backward_query import backward_query_kernel
from seqwarm_kernels.ops.alibi_attention.triton_backward_ranges import (
    RANGE_CHUNK,
    RANGE_TILES,
    backward_ranges_kernel,
)
from seqwarm_kernels.ops.alibi_attention.triton_configurations import (
    KEY_STAGES,
    VALUE_STAGES,
    ShortTile,
    Tiles,
    block_d,
    configuration,
    longer_tile,
    short_tile,
)
from seqwarm_kernels.ops.alibi_attention.triton_decode import CHUNK, MERGED_CHUNKS, decode_tiles
from seqwarm_kernels.ops.alibi_attention.triton_decode_kernel import decode_kernel, merge_kernel
from seqwarm_kernels.ops.alibi_attention.triton_forward import forward_kernel
from seqwarm_kernels.ops.alibi_attention.triton_reach import NORM_BLOCK, NORM_ROWS, key_norms_kernel
from seqwarm_kernels.ops.alibi_attention.triton_short_kernel import short_backward_kernel, short_forward_kernel
from seqwarm_kernels.ops.alibi_attention.triton_tiles import ALIGNED, BULK

from ..common.records import lines_table
from . import amdgcn, compiled_gluon
from .chips import CHIPS, described, named, target_of
from .sass import MATRIX, inner_loops

HEAD_DIMS = (16, 32, 64, 128, 256)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
KERNELS = {
    "norms": key_norms_kernel,
    "forward": forward_kernel,
    "backward_ranges": backward_ranges_kernel,
    "backward_query": backward_query_kernel,
    "backward_key": backward_key_kernel,
    "decode": decode_kernel,
    "merge": merge_kernel,
    "short_forward": short_forward_kernel,
    "short_backward": short_backward_kernel,
    **compiled_gluon.KERNELS,
}
HOPPER = tuple(compiled_gluon.KERNELS)  # 16-bit only
SIMPLE = ("norms", "backward_ranges", "merge")  # without a matrix product
SHORT = ("short_forward", "short_backward")
BY_POINTERS = ("decode", *SHORT)  # also on chips with bulk copies

_TILED = {"query", "key", "value", "grad_out"}  # arguments that may be tensor descriptors
_OPTIONAL = {
    "query_start": "*i64",
    "key_padding_mask": "*i1",
    "dropout_seed": "*i64",
    "cu_seqlens_q": "*i32",
    "cu_seqlens_k": "*i32",
    "key_norm_bound": "*fp32",
    "grad_lse": "*fp32",
    "grad_slope_rows": "*fp32",
    "grad_slopes": "*fp32",
    "edge_value": "*{dtype}",
    "counters": "*i32",
}
_DENSE = {"out", "grad_query", "grad_key", "grad_value"}

#: Kinds of calls: causal or not, the optional arguments that are passed, no bulk copies, products in TF32.
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "slopes": {"causal": True, "present": {"grad_lse", "grad_slope_rows", "grad_slopes"}},
    "window": {"causal": False, "limited": True},
    "packed": {"causal": True, "limited": True, "present": {"cu_seqlens_q", "cu_seqlens_k", "edge_value"}},
    "hidden_keys": {"causal": True, "hides": True, "present": {"query_start", "edge_value"}},
    "packed_starts": {
        "causal": True,
        "limited": True,
        "hides": True,
        "present": {"cu_seqlens_q", "cu_seqlens_k", "edge_value", "query_start"},
    },
    "grouped": {"causal": True, "grouped": True},
    "mask": {"causal": False, "present": {"key_padding_mask"}},
    "dropout": {"causal": True, "present": {"dropout_seed"}},
    "head_offsets": {"causal": True, "head_offsets": True, "present": {"dropout_seed"}},
    "pointers": {"causal": False, "pointers": True},
    "bound": {"causal": True, "present": {"key_norm_bound"}},
    "32 rows": {"causal": False, "rows": 32, "present": {"key_norm_bound"}},
    "tf32": {"causal": False, "dtype": "fp32", "precision": "tf32"},
    "128 tokens": {"causal": True, "longer": True},
}


@dataclass(frozen=True)
class CompiledKernel:
    """Registers, memory and instructions of one compiled kernel."""

    kernel: str
    chip: int | str
    head_dim: int
    dtype: str
    variant: str
    tiles: str  #: queries x keys, warps (of a consumer), stages
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix: int  #: number of matrix instructions, by the names in MATRIX
    loops: int = 0  #: number of innermost loops with matrix instructions. AMD's are not looked at
    pipelined: int = 0  #: number of those that are pipelined
    instructions: int = 0  #: of the shortest of those, which needs no masks
    overlapped: int = 0  #: number of those loops whose exponentials run beside matrix products, on Hopper
    spilled_in_loops: int = 0  #: number of instructions for spills in those loops
    consumers: int = 0  #: number of partitions with matrix products
    wide_loads: int = 0  #: of 16 bytes, through buffers, on AMD's chips
    other_loads: int = 0  #: of tiles, in other ways, on AMD's chips


def _access(chip: int | str, dtype: str, variant: dict[str, Any]) -> int:
    by_pointers = "pointers" in variant or "key_padding_mask" in variant.get("present", ())
    bulk = described(chip).copies_in_bulk and BYTES[dtype] == 2 and not by_pointers
    return BULK.value if bulk else ALIGNED.value


def _tiles(kernel: str, chip: int | str, head_dim: int, dtype: str, variant: str) -> Tiles:
    if kernel in SIMPLE:
        return Tiles(0, 64, 4, 1)
    if kernel == "decode":
        return decode_tiles(VARIANTS[variant].get("rows", 4), head_dim, BYTES[dtype])
    if kernel in SHORT:
        tile = _short_tile(chip, head_dim, dtype, VARIANTS[variant])
        return Tiles(tile.tokens, tile.tokens, tile.num_warps, 1)
    if kernel in HOPPER and (table := compiled_gluon.table_of(chip, head_dim)):
        return compiled_gluon.tiles_of(kernel, table)
    plain = variant not in ("mask", "dropout", "head_offsets", "packed_starts", "hidden_keys")
    light = plain and "limited" not in VARIANTS[variant] and _access(chip, dtype, VARIANTS[variant]) == BULK.value
    return getattr(configuration(described(chip), head_dim, BYTES[dtype], plain=plain, light=light), kernel)


def _short_tile(chip: int | str, head_dim: int, dtype: str, variant: dict[str, Any]) -> ShortTile:
    tile = (longer_tile if "longer" in variant else short_tile)(described(chip), head_dim, BYTES[dtype])
    assert tile is not None
    return tile


def _most_registers(kernel: str, chip: int | str, head_dim: int, dtype: str, variant: dict[str, Any]) -> int | None:
    tile = _short_tile(chip, head_dim, dtype, variant)
    backward = None if "grouped" in variant else tile.backward_registers
    return {"short_forward": tile.forward_registers, "short_backward": backward}.get(kernel)


def _signature(
    kernel: str, chip: int | str, tiles: Tiles, head_dim: int, dtype: str, access: int, variant: dict[str, Any]
) -> Any:
    """Types and constants of the kernel's arguments, as in a launch."""
    constants = {
        "SEARCH_STEPS": 8,
        "CAUSAL": variant["causal"],
        "LIMITED": variant.get("limited", False),
        "GROUPED": variant.get("grouped", False),
        "HEAD_OFFSETS": variant.get("head_offsets", False),
        "HIDES": variant.get("hides", False),
        "BOUNDS": described(chip).is_hopper and "pointers" not in variant,
        "BLIND": variant.get("limited", False) or "key_padding_mask" in variant.get("present", ()),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "BLOCK": tiles.block_m,
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "ROWS": NORM_ROWS,
        "TILES": RANGE_TILES,
        "CHUNK": CHUNK if kernel == "decode" else RANGE_CHUNK,
        "CHUNKS": MERGED_CHUNKS,
        "ACCESS": ALIGNED.value if kernel in SIMPLE else access,
        "PRECISION": variant.get("precision", "ieee"),
        "NORM_BLOCK": NORM_BLOCK,
        "STAGES": tiles.num_stages,
        "K_STAGES": KEY_STAGES,
        "V_STAGES": VALUE_STAGES,
    }
    tiled = compiled_gluon.descriptors(kernel, tiles, head_dim, dtype)
    present = variant.get("present", ())
    types, values = {}, {}
    for parameter in KERNELS[kernel].params:
        name = parameter.name
        if parameter.is_constexpr or (name in _OPTIONAL and name not in present):
            types[name], values[name] = "constexpr", constants.get(name)
        elif parameter.annotation_type:
            types[name] = parameter.annotation_type
        elif name in tiled:
            types[name] = tiled[name]
        elif name in _TILED and kernel not in BY_POINTERS and constants["ACCESS"] == BULK.value:
            rows = tiles.block_n if name in ("key", "value") else tiles.block_m
            types[name] = f"tensordesc<{dtype}[1, 1, {rows}, {block_d(head_dim)}]>"
        elif name in _TILED | _DENSE:
            types[name] = f"*{dtype}"
        else:
            usual = "*i32" if name.endswith(("ranges", "counter")) else "*fp32"
            types[name] = _OPTIONAL.get(name, usual).format(dtype=dtype)
    return types, values


def _hints(types: dict[str, str], chip: int | str) -> dict[tuple[int, ...], Any]:
    """The attributes of tensors in a launch. Only AMD's compiler gets some: aligned, and below 2 GiB."""
    if not described(chip).is_hip:
        return {}
    pointers = [index for index, kind in enumerate(types.values()) if kind.startswith("*")]
    return {(index,): [["tt.divisibility", 16], ["tt.pointer_range", 32]] for index in pointers}


def compile_kernel(kernel: str, chip: int | str, head_dim: int, dtype: str, variant: str) -> CompiledKernel:
    options = VARIANTS[variant]
    tiles = _tiles(kernel, chip, head_dim, dtype, variant)
    types, values = _signature(kernel, chip, tiles, head_dim, dtype, _access(chip, dtype, options), options)
    make_source = GluonASTSource if kernel in compiled_gluon.KERNELS else ASTSource
    compiled = triton.compile(
        make_source(KERNELS[kernel], types, values, _hints(types, chip)),
        target=target_of(chip),
        options={
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
            "enable_fp_fusion": True,
            "maxnreg": _most_registers(kernel, chip, head_dim, dtype, options),
        },
    )
    described_as = {
        "kernel": kernel,
        "chip": chip,
        "head_dim": head_dim,
        "dtype": dtype,
        "variant": variant,
        "tiles": "" if kernel in SIMPLE else "{}x{}, {}, {}".format(*tiles),
        "shared_bytes": compiled.metadata.shared,
    }
    if isinstance(chip, str):
        return CompiledKernel(**described_as, **asdict(amdgcn.read(compiled.asm["amdgcn"])))
    registers, stack, assembly = disassemble(compiled.asm["cubin"])
    loops = inner_loops(assembly, chip)
    return CompiledKernel(
        **described_as,
        registers=registers,
        spilled_bytes=stack,
        matrix=len(re.findall(rf"\b{MATRIX[chip]}", assembly)),
        loops=len(loops),
        pipelined=sum(loop.is_pipelined for loop in loops),
        instructions=min((loop.instructions for loop in loops), default=0),
        overlapped=sum(loop.is_overlapped for loop in loops),
        spilled_in_loops=sum(loop.spills for loop in loops),
        consumers=compiled_gluon.count_consumers(compiled.asm["ttgir"]),
    )


def disassemble(cubin: bytes) -> tuple[int, int, str]:
    """Registers, spilled bytes and instructions of a kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        outputs = [
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("-res-usage", "-sass")
        ]
    registers, stack = map(int, re.search(r"REG:(\d+) STACK:(\d+)", outputs[0]).groups())  # type: ignore[union-attr]
    return registers, stack, outputs[1]


def configurations(chips: Iterable[int | str], head_dims: Iterable[int]) -> Iterator[tuple[Any, ...]]:
    """Arguments of `compile_kernel`: every configuration, causal and full; other variants for common head dims."""
    for chip in chips:
        for head_dim in head_dims:
            for kernel in KERNELS:
                if kernel in HOPPER and not compiled_gluon.table_of(chip, head_dim):
                    continue
                variants = ("causal",) if kernel in SIMPLE else ("causal", "full")
                yield from [(kernel, chip, head_dim, "bf16", variant) for variant in variants]
                if kernel not in HOPPER:
                    yield kernel, chip, head_dim, "fp32", variants[-1]
                if head_dim == 64:
                    yield kernel, chip, head_dim, "fp16", variants[-1]
                if head_dim in (64, 128) and kernel not in SIMPLE:
                    others = VARIANTS.keys() - set(variants)
                    for name in sorted(name for name in others if _differs(name, kernel, chip, head_dim)):
                        yield kernel, chip, head_dim, VARIANTS[name].get("dtype", "bf16"), name


def _differs(variant: str, kernel: str, chip: int | str, head_dim: int) -> bool:
    """Whether the variant is another kernel than "causal" and "full" are."""
    if variant == "slopes":
        return kernel in ("backward_query", "short_backward", "gluon_backward_query")
    if kernel in HOPPER:
        return variant == "window"
    if variant == "grouped":
        return kernel == "short_backward"
    if variant == "128 tokens":
        return kernel == "short_backward" and longer_tile(described(chip), head_dim, 2) is not None
    if variant in ("bound", "32 rows"):
        return kernel == "decode"
    if kernel in BY_POINTERS:
        return variant in ("mask", "dropout", "head_offsets") or (kernel == "decode" and variant == "window")
    if variant in ("pointers", "tf32"):  # not the default, so the larger head dim is enough
        differs = described(chip).copies_in_bulk if variant == "pointers" else not described(chip).is_hip
        return head_dim == 128 and differs
    return True


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chips", type=named, nargs="+", choices=CHIPS, default=CHIPS, help="90 for capability 9.0")
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=tuple(KERNELS))
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS), help="kinds of calls")
    parser.add_argument("--json", action="store_true", help="print a line of JSON after each kernel")


def main(arguments: argparse.Namespace) -> None:
    kernels = []
    every = configurations(arguments.chips, arguments.head_dims)
    chosen = [each for each in every if each[0] in arguments.kernels and each[-1] in arguments.variants]
    for each in tqdm(chosen, desc="compile", unit="kernel", disable=arguments.json):
        kernels.append(compile_kernel(*each))
        if arguments.json:
            print(json.dumps(asdict(kernels[-1])), flush=True)
    if not arguments.json:
        print(lines_table([asdict(kernel) for kernel in kernels]))
