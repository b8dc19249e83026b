"""The host side of the Triton kernels as on a GPU, up to the launch: real arguments, real compiler.

    python -m tests.support.pretend_gpu resizing 90

A separate program, because Triton's interpreter, which other tests use, replaces the host side. Prints as JSON what the
function of the given name returns.
"""

import json
import os
import re
import sys
from collections import Counter
from dataclasses import asdict

import numpy as np
import torch

os.environ.pop("TRITON_INTERPRET", None)
if sys.argv[1:2] == ["amd"]:
    torch.version.hip = "7.0"

from triton.compiler import CompiledKernel

from bench.alibi_attention import amdgcn, pretended_gpu
from bench.alibi_attention.compiled import disassemble
from seqwarm_kernels import SequenceLengthScheduler, alibi_attention, alibi_slopes, compilations, no_compilation
from seqwarm_kernels.ops import backends
from seqwarm_kernels.ops.alibi_attention import triton as attention_host
from seqwarm_kernels.ops.alibi_attention.schema import DenseOptions
from seqwarm_kernels.ops.moment_statistics.triton import moment_statistics
from seqwarm_kernels.ops.resize_batch import triton as resize_host
from seqwarm_kernels.ops.resize_batch.schema import RULES, Kind
from seqwarm_kernels.ops.resize_packed import triton as packed_host
from seqwarm_kernels.ops.resize_packed.schema import PackedKind, cut_sequences

LONGEST = 1024


def pretend(chip):
    """Compile kernels for a chip from now on instead of running them. Returns a list of the launched kernels."""
    launched = []
    pretended_gpu.pretend(int(chip) if chip.isdigit() else chip)
    CompiledKernel.launch_metadata = lambda kernel, *launch: launched.append(kernel)
    return launched


def number_of(launched):
    return len({id(kernel) for kernel in launched})


def forward_and_backward(batch_size, length, head_dim=64):
    query = torch.randn(batch_size, length, 4, head_dim, dtype=torch.bfloat16).transpose(1, 2)
    key = torch.randn(batch_size, 2, length, head_dim, dtype=torch.bfloat16)
    slopes = alibi_slopes(4)
    options = DenseOptions(None, None, None, 0, True, 0.125, None, None, 0.0, 2**-24)
    out, lse, log2_sum, ranges = attention_host.forward(query, key, key, slopes, options)
    attention_host.backward((out, lse, out, lse, log2_sum, ranges, True, query, key, key, slopes), options)


def resized(rule, rows, new_length):
    inputs = [
        torch.zeros(rows, LONGEST, dtype=torch.int64),
        torch.zeros(rows, LONGEST, dtype=torch.bool),
        torch.zeros(rows, LONGEST, 24, dtype=torch.bfloat16),
    ]
    kinds = [Kind.LABEL, Kind.SEQUENCE, Kind.SEQUENCE]
    resize_host.resize_batch(inputs, inputs[1], rows, LONGEST, new_length, rule, kinds, [-100, 0, 0], True)


def resized_packed(sequences, length, new_length):
    tokens = sequences * length
    inputs = [torch.zeros(sequences)] + 4 * [torch.zeros(tokens, dtype=torch.int64)]
    inputs.append(torch.zeros(tokens, 24, dtype=torch.bfloat16))
    mask = torch.zeros(tokens, dtype=torch.bool)
    pieces, new_bounds = cut_sequences(length * np.arange(sequences + 1), new_length, "reshape_overlap")
    kinds = [*map(int, PackedKind), int(PackedKind.TOKEN)]
    packed_host.resize_packed(inputs, mask, pieces, int(new_bounds[-1]), kinds, [0, 0, -100, 0, 0, 0], True)


def attention(chip):
    """The number of kernels compiled after a length at which rows share tiles, a short one, a long one, and others.

    Also whether two calls of a kind launch alike, and whether all kernels fuse multiplications with additions.
    """
    launched, counts = pretend(chip), {}
    for name, length in {"shared": 16, "short": 128, "long": LONGEST}.items():  # skipping in the last
        forward_and_backward(2, length)
        counts[name] = number_of(launched)
    for batch_size, length in ((1, 1), (3, 17), (16, 64), (2, 16), (5, 513), (1, 2048)):
        forward_and_backward(batch_size, length)
    counts["afterwards"] = number_of(launched)
    fused = all(kernel.metadata.enable_fp_fusion for kernel in launched)
    launches = launches_of_two_calls(LONGEST)
    half = len(launches) // 2
    return {**counts, "launches": half, "launched alike": launches[:half] == launches[half:], "fused": fused}


def launches_of_two_calls(length):
    """Those of the first call of a kind, whose arguments Triton finds by name, and those of the second."""
    launches = []

    def launch(kernel, grid, stream, *arguments):
        launches.append((kernel.name, grid, [described(argument) for argument in arguments]))

    CompiledKernel.launch_metadata = launch
    attention_host._known.clear()
    for _ in range(2):
        forward_and_backward(2, length)
    return launches


def described(argument):
    if isinstance(argument, torch.Tensor):
        return argument.shape, argument.stride(), argument.dtype
    if hasattr(argument, "block_shape"):  # a descriptor
        return argument.shape, argument.strides, argument.block_shape
    return argument


def amd(chip):
    """Why Triton does not serve (None), and what kernels need that calls of attention and of resize_batch launch."""
    problem, launched = backends.problem("triton"), pretend(chip)
    for length in (16, 512):  # at which rows share tiles, and keys are skipped
        forward_and_backward(2, length)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    query, key = torch.randn(1, 4, 1, 64), torch.randn(1, 4, 512, 64)
    alibi_attention(query, key, key, backend="triton")
    resized("truncate", 4, 256)
    kernels = {kernel.name: asdict(amdgcn.read(kernel.asm["amdgcn"])) for kernel in launched}
    return {"problem": problem, "kernels": kernels}


def ramp(chip):
    """The names of the kernels that attention and resizing compile at every length of a ramp, and no others after."""
    pretend(chip)
    scheduler = SequenceLengthScheduler(8, LONGEST, duration=1000, step_size=8)
    lengths = [milestone.seq_length for milestone in scheduler.milestones()]

    def visit(lengths):
        for length in lengths:
            resized("truncate", 4, length)
            forward_and_backward(4, length)

    with compilations() as compiled:
        visit(reversed(lengths))  # as warmup_allocator passes them
    with no_compilation():
        visit(lengths)
    return {"lengths": len(lengths), "compiled": compiled}


def resizing(chip):
    """What the kernel of every rule needs, and the number of kernels of a ramp; the same for packed batches."""
    launched, kernels, compiled = pretend(chip), {}, []
    for rule in RULES:
        resized(rule, 4, 256)
        kernels[rule] = moves_of(launched[-1])
    compiled.append(number_of(launched))
    for new_length in range(8, LONGEST, 8):
        resized("truncate_valid", 4, new_length)
    compiled.append(number_of(launched))
    for rows in (1, 16, 33):
        resized("truncate_valid", rows, 64)
    compiled.append(number_of(launched))
    resized_packed(4, 1024, 256)
    kernels["packed"] = moves_of(launched[-1])
    for sequences, length, new_length in [(1, 1, 1), (3, 7, 2), (16, 512, 64), (33, 1000, 8), (4, 1024, 1024)]:
        resized_packed(sequences, length, new_length)
    compiled.append(number_of(launched))
    return {"kernels": kernels, "ramp, rows, packed": np.diff(compiled).tolist()}


def moves_of(compiled):
    _, spilled, assembly = disassemble(compiled.asm["cubin"])
    moves = Counter(re.findall(r"\b(LDG|STG)\.E\.128\b", assembly))
    return {"spilled_bytes": spilled, "wide_loads": moves["LDG"], "wide_stores": moves["STG"]}


def moments(chip):
    """Of the kernel: spills and wide loads; of loads that follow the first ticket, how many may find old values."""
    launched = pretend(chip)
    for count in (1, 2, 16, 600):
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            tensors = [torch.zeros(31 * count, dtype=dtype) for _ in range(count)]
            moment_statistics(tensors, tensors[1:], tensors)
    _, spilled, assembly = disassemble(launched[-1].asm["cubin"])
    report = {"kernels": number_of(launched), "spilled": spilled}
    report["wide_loads"] = len(re.findall(r"\bLDG(?:\.\w+)*\.128\b", assembly))
    _, after_ticket = launched[-1].asm["ptx"].split("atom.global", 1)
    late = re.findall(r"\bld\.global[.\w]*", after_ticket)
    return report | {"late_loads": len(late), "cached": sum(".cg" not in load for load in late)}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](sys.argv[2])))
