"""What a call of alibi_attention costs beside its arithmetic.

On the CPU: one row of one token, beside torch's attention. No rows at all: forward and backward without forward is what
torch.autograd.grad and the call's node cost. For GPUs: the time of the host, with a launcher that does nothing. Needs a
process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqwarm_kernels import alibi_attention

from ..common.records import CpuRecord, cpu_kind, in_turns, save, table
from .cases import BOTH, FORWARD, call_of
from .pretended_gpu import pretend
from .report import CALLS

HEADS = (1, 12)
CHIP = 90
#: Triton launches three kernels for the first length, one in forward, and five for the other, two in forward.
LENGTHS = (128, 512)

NATIVE = {"alibi_attention native": partial(alibi_attention, backend="native")}
TRITON = {"alibi_attention triton": partial(alibi_attention, backend="triton")}
SDPA = {"SDPA": partial(scaled_dot_product_attention, is_causal=True)}
SECONDS = 2.0  #: of measuring, for each record


def measure(
    case: str, peers: Mapping[str, Callable[..., Tensor]], shape: tuple[int, ...], dtype: torch.dtype, seconds: float
) -> Iterator[CpuRecord]:
    for work in (FORWARD, BOTH):
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        calls = {name: call_of(work, attend, inputs, torch.ones(shape, dtype=dtype)) for name, attend in peers.items()}
        facts = {"heads": shape[1], "length": shape[2], "work": work}
        yield from in_turns("alibi_attention", f"{work}, {case}", calls, 1, seconds, facts)


def run(seconds: float) -> Iterator[CpuRecord]:
    for heads in HEADS:
        yield from measure(f"B1 H{heads} S1 D64", NATIVE | SDPA, (1, heads, 1, 64), torch.float32, seconds)
    yield from measure("no rows, autograd alone", NATIVE, (0, 2, 128, 64), torch.float32, seconds)
    pretend(CHIP)
    for length in LENGTHS:
        case = f"B1 H2 S{length} D64 float16, pretended GPU {CHIP / 10}"
        yield from measure(case, TRITON, (1, 2, length, 64), torch.float16, seconds)


def main(arguments: argparse.Namespace) -> None:
    save(f"{CALLS}_{cpu_kind()}", run(SECONDS), table)
