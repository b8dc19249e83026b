"""Compile the attention kernels for chips that are not here, and read what the compiler made of them.

Triton's package carries the assembler and disassembler, so registers, spills, shared memory and the instructions
that matter are known without a GPU. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seqwarm_kernels.ops.alibi_attention.triton_backward_key import backward_key_kernel
from seqwarm_kernels.ops.alibi_attention.triton_backward_query import backward_query_kernel
from seqwarm_kernels.ops.alibi_attention.triton_backward_terms import TERM_ROWS, backward_terms_kernel
from seqwarm_kernels.ops.alibi_attention.triton_configurations import (
    BULK_COPIES_FROM,
    CHIPS,
    Tiles,
    block_d,
    configuration,
)
from seqwarm_kernels.ops.alibi_attention.triton_forward import forward_kernel
from seqwarm_kernels.ops.alibi_attention.triton_reach import NORM_BLOCK, NORM_ROWS, key_norms_kernel
from seqwarm_kernels.ops.alibi_attention.triton_tiles import ALIGNED, BULK

HEAD_DIMS = (16, 32, 64, 128, 256)
BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
KERNELS = {
    "norms": key_norms_kernel,
    "forward": forward_kernel,
    "backward_terms": backward_terms_kernel,
    "backward_query": backward_query_kernel,
    "backward_key": backward_key_kernel,
}
SIMPLE = ("norms", "backward_terms")  # one pass over rows, without a matrix product
#: Bytes of shared memory that a program may have; chip 80 by what 8.6 and 8.9, which share its tiles, have.
SHARED_LIMIT = {80: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
#: The chip's own instructions, as its disassembly calls them.
MATRIX = {80: "HMMA", 90: "HGMMA", 100: "UTCHMMA"}
COPY = {80: "LDGSTS", 90: "UTMALDG", 100: "UTMALDG"}

_TILED = {"query", "key", "value", "grad_out"}  # what a descriptor may stand for
_OPTIONAL = {
    "query_start": "*i64",
    "key_padding_mask": "*i1",
    "dropout_seed": "*i64",
    "cu_seqlens_q": "*i32",
    "cu_seqlens_k": "*i32",
    "norms": "*fp32",
    "grad_slope_rows": "*fp32",
}
_WRITTEN = {"out", "grad_query", "grad_key", "grad_value"}

#: What may be asked of a call beyond causal: which optional arguments are there.
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "full": {"causal": False},
    "packed": {"causal": True, "present": {"cu_seqlens_q", "cu_seqlens_k"}},
    "mask": {"causal": False, "present": {"key_padding_mask"}},
    "dropout": {"causal": True, "present": {"dropout_seed"}},
}


@dataclass(frozen=True)
class Report:
    """What one compiled kernel needs."""

    kernel: str
    chip: int
    head_dim: int
    dtype: str
    variant: str
    tiles: str  #: queries x keys, warps, stages
    registers: int
    spilled_bytes: int
    shared_bytes: int
    matrix: int  #: instructions of the chip's own kind: see MATRIX
    copies: int  #: bulk or asynchronous copies: see COPY


def _access(chip: int, dtype: str, variant: dict[str, Any]) -> int:
    bulk = chip >= BULK_COPIES_FROM and BYTES[dtype] == 2 and "key_padding_mask" not in variant.get("present", ())
    return BULK.value if bulk else ALIGNED.value


def _tiles(kernel: str, chip: int, head_dim: int, dtype: str, variant: str) -> Tiles:
    if kernel in SIMPLE:
        return Tiles(0, 0, 4, 1)
    plain = variant in ("causal", "full", "packed")
    return getattr(configuration(chip, head_dim, BYTES[dtype], plain=plain), kernel)


def _signature(kernel: str, tiles: Tiles, head_dim: int, dtype: str, access: int, variant: dict[str, Any]) -> Any:
    """Types and constants of the kernel's arguments, as a launch would give them."""
    constants = {
        "SEARCH_STEPS": 8,
        "CAUSAL": variant["causal"],
        "REACH": True,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "ROWS": NORM_ROWS if kernel == "norms" else TERM_ROWS,
        "ACCESS": ALIGNED.value if kernel in SIMPLE else access,
        "PRECISION": "ieee",
        "NORM_BLOCK": NORM_BLOCK,
    }
    present = {"norms", "grad_slope_rows", *variant.get("present", ())}
    types, values = {}, {}
    for parameter in KERNELS[kernel].params:
        name = parameter.name
        if parameter.is_constexpr or (name in _OPTIONAL and name not in present):
            types[name], values[name] = "constexpr", constants.get(name)
        elif parameter.annotation_type:
            types[name] = parameter.annotation_type
        elif name in _TILED and constants["ACCESS"] == BULK.value:
            rows = tiles.block_n if name in ("key", "value") else tiles.block_m
            types[name] = f"tensordesc<{dtype}[1, 1, {rows}, {block_d(head_dim)}]>"
        elif name in _TILED | _WRITTEN:
            types[name] = f"*{dtype}"
        else:
            types[name] = _OPTIONAL.get(name, "*i32" if name == "ranges" else "*fp32")
    return types, values


def compile_kernel(kernel: str, chip: int, head_dim: int, dtype: str, variant: str) -> Report:
    options = VARIANTS[variant]
    tiles = _tiles(kernel, chip, head_dim, dtype, variant)
    types, values = _signature(kernel, tiles, head_dim, dtype, _access(chip, dtype, options), options)
    compiled = triton.compile(
        ASTSource(KERNELS[kernel], types, values),
        target=GPUTarget("cuda", chip, 32),
        options={"num_warps": tiles.num_warps, "num_stages": tiles.num_stages},
    )
    registers, stack, assembly = disassemble(compiled.asm["cubin"])
    return Report(
        kernel=kernel,
        chip=chip,
        head_dim=head_dim,
        dtype=dtype,
        variant=variant,
        tiles="" if kernel in SIMPLE else "{}x{}, {}, {}".format(*tiles),
        registers=registers,
        spilled_bytes=stack,
        shared_bytes=compiled.metadata.shared,
        matrix=len(re.findall(rf"\b{MATRIX[chip]}", assembly)),
        copies=len(re.findall(rf"\b{COPY[chip]}", assembly)),
    )


def disassemble(cubin: bytes) -> tuple[int, int, str]:
    """A kernel's registers, spilled bytes, and instructions."""
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


def cases(chips: tuple[int, ...] = CHIPS, head_dims: tuple[int, ...] = HEAD_DIMS) -> Iterator[tuple[Any, ...]]:
    """Every row of the table of configurations, causal and full; the other variants where they are used most."""
    for chip in chips:
        for head_dim in head_dims:
            for kernel in KERNELS:
                variants = ("causal",) if kernel in SIMPLE else ("causal", "full")
                yield from [(kernel, chip, head_dim, "bf16", variant) for variant in variants]
                yield kernel, chip, head_dim, "fp32", variants[-1]
                if head_dim == 64:
                    yield kernel, chip, head_dim, "fp16", variants[-1]
                if head_dim in (64, 128) and kernel not in SIMPLE:
                    others = [variant for variant in VARIANTS if variant not in variants]
                    yield from [(kernel, chip, head_dim, "bf16", variant) for variant in others]


def table(reports: list[Report]) -> str:
    lines = [
        "| kernel | chip | D | dtype | variant | tiles, warps, stages | registers | spilled bytes | shared KiB "
        "| matrix | copies |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in reports:
        lines.append(
            f"| {r.kernel} | sm_{r.chip} | {r.head_dim} | {r.dtype} | {r.variant} | {r.tiles} | {r.registers} "
            f"| {r.spilled_bytes} | {r.shared_bytes / 1024:.1f} | {r.matrix} {MATRIX[r.chip]} "
            f"| {r.copies} {COPY[r.chip]} |"
        )
    return "\n".join(lines)
