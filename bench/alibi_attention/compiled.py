"""Compiles the attention kernels without a GPU, as calls on one would, and prints what each kernel needs.

Triton's package contains the assemblers and a disassembler, so registers, spills, shared memory and instructions are
known without a GPU. Needs a process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from tqdm import tqdm
from triton.compiler import CompiledKernel

from seqwarm_kernels import alibi_slopes
from seqwarm_kernels.attention.calls import DEFAULT_SKIP_TOLERANCE
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention import triton_configurations
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions, VarlenOptions

from ..common.records import lines_table
from . import amdgcn
from .pretended_gpu import AMD, CHIPS, named, pretend
from .sass import MATRIX, inner_loops

HEAD_DIMS = (16, 32, 64, 128, 256)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Rows, queries and keys: rows that share tiles, a row of several tiles, one that skips keys, one that is long enough
#: for the kernels for Hopper, which does not skip keys, and decoding.
LONG, DECODING = (1, 4096, 4096), (1, 1, 1024)
SIZES: tuple[tuple[int, int, int], ...] = ((4, 16, 16), (1, 256, 256), (1, 1024, 1024), LONG, DECODING)
#: Kinds of calls. What a kind shares with those above it is not compiled again.
VARIANTS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "slopes": {"slopes_need_grad": True},
    "window": {"causal": False, "window": 64},
    "packed": {"packed": True},
    "hidden_keys": {"starts": True},
    "packed_starts": {"packed": True, "starts": True},
    "grouped": {"key_heads": 1, "sizes": SIZES[:1]},
    "mask": {"causal": False, "masked": True},
    "dropout": {"dropout": True},
    "head_offsets": {"dropout": True, "head_offsets": True},
    "pointers": {"causal": False, "pointers": True},
    "bound": {"bound": True, "sizes": (DECODING,)},
    "32 rows": {"bound": True, "heads": 32, "key_heads": 1, "sizes": (DECODING,)},
    "tf32": {"causal": False, "tf32": True},
    "128 tokens": {"sizes": ((4, 128, 128),)},
}
_NOT_THE_DEFAULT = ("pointers", "tf32")  # so the larger of the common head dims is enough


@dataclass(frozen=True)
class Report:
    """Registers, memory and instructions of one compiled kernel."""

    kernel: str
    chip: int | str
    head_dim: int
    dtype: str
    variant: str
    tiles: str  #: queries x keys, warps, stages
    shared_bytes: int
    registers: int
    spilled_bytes: int
    matrix: int  #: number of matrix instructions, by the names in MATRIX
    loops: int = 0  #: number of innermost loops with matrix instructions. AMD's are not looked at
    pipelined: int = 0  #: number of those that are pipelined
    instructions: int = 0  #: of the shortest of those, which needs no masks
    overlapped: int = 0  #: number of those loops whose exponentials run beside matrix products, on Hopper
    spilled_in_loops: int = 0  #: number of instructions for spills in those loops
    consumers: int = 0  #: number of partitions with matrix products
    wide_loads: int = 0  #: of 16 bytes, through buffers, on AMD's chips
    other_loads: int = 0  #: of tiles, in other ways, on AMD's chips


def call(
    size: tuple[int, int, int],
    head_dim: int,
    dtype: torch.dtype,
    *,
    heads: int = 2,
    key_heads: int | None = None,
    causal: bool = True,
    window: int | None = None,
    packed: bool = False,
    starts: bool = False,
    masked: bool = False,
    dropout: bool = False,
    head_offsets: bool = False,
    bound: bool = False,
    slopes_need_grad: bool = False,
) -> None:
    """Forward, and backward if each query has a key."""
    host: Any = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton")
    (rows, queries, keys), key_heads = size, key_heads or heads
    query = torch.zeros(rows, queries, heads, head_dim, dtype=dtype).transpose(1, 2)
    key = torch.zeros(rows, keys, key_heads, head_dim, dtype=dtype).transpose(1, 2)
    seed = torch.zeros((rows, heads, 4) if head_offsets else (), dtype=torch.int64) if dropout else None
    start = torch.zeros(rows, dtype=torch.int64) if starts else None
    tolerance = 0.0 if size == LONG else DEFAULT_SKIP_TOLERANCE
    dropout_p, scale = 0.1 if dropout else 0.0, head_dim**-0.5
    options: DenseOptions | VarlenOptions = DenseOptions(
        start,
        torch.ones(rows, keys, dtype=torch.bool) if masked else None,
        seed,
        keys - queries,
        causal,
        scale,
        None,
        window,
        dropout_p,
        tolerance,
        torch.ones(rows, key_heads) if bound else None,
    )
    if packed:
        query, key = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key))
        ends = queries * torch.arange(rows + 1, dtype=torch.int32)
        other_ends = keys * torch.arange(rows + 1, dtype=torch.int32)
        options = VarlenOptions(
            ends, other_ends, seed, queries, keys, causal, scale, window, dropout_p, tolerance, start
        )  # fmt: skip
    slopes = alibi_slopes(heads)
    out, lse, *saved = host.forward(query, key, key, slopes, options)
    if queries == keys:
        grad_lse = lse if slopes_need_grad else None
        host.backward((out, grad_lse, out, lse, *saved, slopes_need_grad, query, key, key, slopes), options)


class Compilation:
    """Compiles for one chip after another, and notes each kernel once. Others than `kernels` are left out."""

    def __init__(self, kernels: Iterable[str] | None) -> None:
        self._kernels, self._launched = kernels, dict[int, CompiledKernel]()
        triton.knobs.runtime.jit_cache_hook = self._is_left_out
        CompiledKernel.launch_metadata = lambda kernel, *_: self._launched.setdefault(id(kernel), kernel) and None

    def _is_left_out(self, *, fn: Any, **_: Any) -> bool:
        """Triton compiles nothing if this is true."""
        return self._kernels is not None and _name(fn.name) not in self._kernels

    def reports(self, chip: int | str, head_dim: int, dtype: str, variant: str) -> Iterator[Report]:
        known = len(self._launched)
        options = {**VARIANTS[variant]}
        torch.backends.cuda.matmul.fp32_precision = "tf32" if options.pop("tf32", False) else "ieee"
        triton_configurations.BULK_COPIES = range(90, 90 if options.pop("pointers", False) else 120)
        pretend(chip)
        for size in options.pop("sizes", SIZES):
            call(size, head_dim, DTYPES[dtype], **options)
        for compiled in [*self._launched.values()][known:]:
            yield report_of(compiled, chip, head_dim, dtype, variant)


def _name(function: str) -> str:
    return function.rpartition(".")[2].removesuffix("_kernel")


def _tiles(compiled: CompiledKernel) -> str:
    """The consumers of a Gluon kernel have 128 rows together."""
    names = compiled.src.fn.arg_names
    constants = {names[place]: value for (place, *_), value in compiled.src.constants.items()}
    if constants.keys().isdisjoint(("BLOCK", "BLOCK_M", "BLOCK_N")):
        return ""
    rows, columns = (constants.get(name, constants.get("BLOCK", 128)) for name in ("BLOCK_M", "BLOCK_N"))
    stages = constants.get("STAGES") or constants.get("K_STAGES") or compiled.metadata.num_stages
    return f"{rows}x{columns}, {compiled.metadata.num_warps}, {stages}"


def report_of(compiled: CompiledKernel, chip: int | str, head_dim: int, dtype: str, variant: str) -> Report:
    described = _name(compiled.name), chip, head_dim, dtype, variant, _tiles(compiled), compiled.metadata.shared
    if isinstance(chip, str):
        return Report(*described, **asdict(amdgcn.read(compiled.asm["amdgcn"])))
    registers, stack, assembly = disassemble(compiled.asm["cubin"])
    loops = inner_loops(assembly, chip)
    partitions = re.split(r"^ +(?:default \{|partition\d+\()", compiled.asm["ttgir"], flags=re.MULTILINE)[1:]
    return Report(
        *described,
        registers=registers,
        spilled_bytes=stack,
        matrix=len(re.findall(rf"\b{MATRIX[chip]}", assembly)),
        loops=len(loops),
        pipelined=sum(loop.is_pipelined for loop in loops),
        instructions=min((loop.instructions for loop in loops), default=0),
        overlapped=sum(loop.is_overlapped for loop in loops),
        spilled_in_loops=sum(loop.spills for loop in loops),
        consumers=sum("warp_group_dot" in partition for partition in partitions),
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
    """Arguments of `reports`: causal and full with every head dim, other variants with the common ones."""
    for chip in chips:
        for head_dim in head_dims:
            yield from [(chip, head_dim, "bf16", variant) for variant in ("causal", "full")]
            yield chip, head_dim, "fp32", "full"
            if head_dim == 64:
                yield chip, head_dim, "fp16", "full"
            if head_dim in (64, 128):
                for variant in [*VARIANTS][2:]:
                    if head_dim == 128 or variant not in _NOT_THE_DEFAULT:
                        yield chip, head_dim, "fp32" if variant == "tf32" else "bf16", variant


def add_arguments(parser: argparse.ArgumentParser) -> None:
    chips = [chip for chip in CHIPS if chip not in AMD]
    parser.add_argument("--chips", type=named, nargs="+", choices=CHIPS, default=chips, help="90 for capability 9.0")
    parser.add_argument("--kernels", nargs="+", metavar="NAME", help="such as forward; others are not compiled")
    parser.add_argument("--head-dims", type=int, nargs="+", choices=HEAD_DIMS, default=HEAD_DIMS)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=tuple(VARIANTS), help="kinds of calls")
    parser.add_argument("--json", action="store_true", help="print a line of JSON after each kernel")


def main(arguments: argparse.Namespace) -> None:
    backends.IS_HIP = any(chip in AMD for chip in arguments.chips)
    if backends.IS_HIP and not AMD.keys() >= set(arguments.chips):
        sys.exit("chips of AMD and of NVIDIA need a call each")
    compilation, reports = Compilation(arguments.kernels), []
    every = configurations(arguments.chips, arguments.head_dims)
    chosen = [each for each in every if each[-1] in arguments.variants]
    for each in tqdm(chosen, desc="compile", unit="variant", disable=arguments.json):
        for report in compilation.reports(*each):
            reports.append(asdict(report))
            if arguments.json:
                print(json.dumps(reports[-1]), flush=True)
    if not arguments.json:
        print(lines_table(reports))
