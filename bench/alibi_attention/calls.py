"""What a call of alibi_attention costs beside its arithmetic.

On the CPU: one row of one token, beside torch's attention. No rows at all: forward and backward without forward is what
torch.autograd.grad and the call's node cost. For GPUs: the time of the host, with a launcher that does nothing. Needs a
process without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from seqwarm_kernels import alibi_attention

from ..common.records import CpuRecord, cpu_kind, table, write
from ..common.timing import measure_in_turns
from .cases import BOTH, FORWARD, call_of
from .pretended_gpu import pretend
from .report import CALLS

HEADS = (1, 12)
CHIP = 90
#: Triton launches three kernels for the first length, one in forward, and five for the other, two in forward.
LENGTHS = (128, 512)

_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def _native(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return alibi_attention(query, key, value, backend="native")


def _triton(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return alibi_attention(query, key, value, backend="triton")


def _torch(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def measure(
    case: str, peers: Mapping[str, _Attend], shape: tuple[int, ...], dtype: torch.dtype, seconds: float
) -> Iterator[CpuRecord]:
    for work in (FORWARD, BOTH):
        inputs = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
        calls = {name: call_of(work, attend, inputs, torch.ones(shape, dtype=dtype)) for name, attend in peers.items()}
        for name, timing in measure_in_turns(calls, 1, seconds).items():
            facts = {"heads": shape[1], "length": shape[2], "work": work}
            yield CpuRecord("alibi_attention", f"{work}, {case}", name, 1, timing.median, timing.iqr, None, facts)


def run(seconds: float) -> Iterator[CpuRecord]:
    for heads in HEADS:
        peers = {"alibi_attention native": _native, "SDPA": _torch}
        yield from measure(f"B1 H{heads} S1 D64", peers, (1, heads, 1, 64), torch.float32, seconds)
    yield from measure(
        "no rows, autograd alone", {"alibi_attention native": _native}, (0, 2, 128, 64), torch.float32, seconds
    )
    pretend(CHIP)
    for length in LENGTHS:
        case = f"B1 H2 S{length} D64 float16, pretended GPU {CHIP / 10}"
        yield from measure(case, {"alibi_attention triton": _triton}, (1, 2, length, 64), torch.float16, seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a record (default: %(default)s seconds)")


def main(arguments: argparse.Namespace) -> None:
    path, records = write(f"{CALLS}_{cpu_kind()}", run(arguments.seconds))
    print(table(records))
    print(f"\nwritten to {path}")
