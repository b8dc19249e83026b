"""alibi_attention on the CPU beside the ways to get ALiBi, or at least causal attention, from torch itself.

With pytest-benchmark, and on a GPU where there is one: `pytest bench/bench_alibi_attention.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from tqdm import tqdm

from seqwarm_kernels import alibi_attention, alibi_slopes

from .measure import Record, measure, relative_error, table, write
from .peers import Attend, Peer, Problem, eager, everyone, flex, sdpa, sdpa_with_bias

LENGTHS = (128, 1024)
CPU_PEERS = [
    Peer("eager with bias", eager),
    Peer("SDPA with bias mask", sdpa_with_bias),
    Peer("FlexAttention, compiled", flex(None), has_backward=torch.cuda.is_available()),
    Peer("SDPA causal, no bias", sdpa(), has_bias=False),
    Peer("alibi_attention reference", lambda problem, device: _reference(problem)),
]


def _reference(problem: Problem) -> Attend:
    slopes = alibi_slopes(problem.heads)
    return lambda query, key, value: alibi_attention(query, key, value, slopes, backend="reference")


def problem_of(length: int, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(2, 12, 12, length, 64, dtype=dtype)


def draw(problem: Problem, device: str = "cpu") -> list[Tensor]:
    shape = (problem.batch_size, problem.heads, problem.length, problem.head_dim)
    return [torch.randn(shape, device=device).to(problem.dtype).requires_grad_() for _ in range(3)]


def forward(attend: Attend, inputs: list[Tensor]) -> Callable[[], Tensor]:
    detached = [tensor.detach() for tensor in inputs]  # FlexAttention on the CPU takes no others
    return lambda: attend(*detached)


def forward_and_backward(attend: Attend, inputs: list[Tensor], grad_out: Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad_out)


def run(seconds: float) -> list[Record]:
    records = []
    for length in tqdm(LENGTHS, desc="alibi_attention", unit="length"):
        problem = problem_of(length)
        inputs = draw(problem)
        grad_out = torch.randn_like(inputs[0])
        double = [tensor.detach().double() for tensor in inputs]
        slopes = alibi_slopes(problem.heads).double()
        exact = alibi_attention(double[0], double[1], double[2], slopes, backend="reference")
        for peer in CPU_PEERS:
            attend = peer.make(problem, torch.device("cpu"))
            calls: dict[str, Callable[[], object]] = {"forward": forward(attend, inputs)}
            if peer.has_backward:
                calls["forward + backward"] = forward_and_backward(attend, inputs, grad_out)
            error = relative_error(forward(attend, inputs)(), exact) if peer.has_bias else None
            for work, call in calls.items():
                case = f"{work}, causal, float32 B2 H12 S{length} D64"
                max_error = error if work == "forward" else None
                records.append(
                    measure(
                        call,
                        operator="alibi_attention",
                        case=case,
                        implementation=peer.name,
                        threads=torch.get_num_threads(),
                        seconds=seconds,
                        max_error=max_error,
                    )
                )
    return sorted(records, key=lambda record: record.case)


@pytest.mark.parametrize("work", ["forward", "forward + backward"])
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("peer", [*everyone()], ids=lambda peer: peer.name)
def test_attention(benchmark: Any, peer: Peer, length: int, work: str) -> None:
    """A call with everything that it waits for, the device included."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    problem = problem_of(length, torch.bfloat16 if device == "cuda" else torch.float32)
    inputs = draw(problem, device)
    attend = peer.make(problem, torch.device(device))
    call: Callable[[], object] = forward(attend, inputs)
    if work != "forward":
        call = forward_and_backward(attend, inputs, torch.randn_like(inputs[0]))

    def call_and_wait() -> None:
        call()
        if device == "cuda":
            torch.cuda.synchronize()

    try:
        call_and_wait()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"{peer.name} does not serve this: {error}")
    benchmark(call_and_wait)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each row of the table")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds)
    path = write("cpu_alibi_attention", records)
    print(f"{table(records)}\n\nwritten to {path}")
