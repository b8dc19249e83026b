"""alibi_attention on the CPU beside the ways to get ALiBi, or at least causal attention, from torch itself.

With pytest-benchmark, on a GPU where there is one: `pytest bench/bench_alibi_attention.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from .device_attention import BOTH, FORWARD, Case, call_of
from .measure import Record, measure, table, write
from .peers import EAGER, FLASH, FLEX, MASK, Attend, everyone, reference
from .problems import Problem

LENGTHS = (128, 1024)
CPU = torch.device("cpu")


def problem_of(length: int, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(2, 12, 12, length, 64, dtype=dtype)


def implementations(problem: Problem) -> Iterator[tuple[str, Attend, bool, bool]]:
    """Name, function, whether it has ALiBi's bias, and whether it has a backward."""
    names = {FLEX: "FlexAttention, compiled", FLASH: "SDPA causal, no bias"}
    for peer in (EAGER, MASK, FLEX, FLASH, reference()):
        yield names.get(peer, peer.name), peer.make(problem, CPU), peer.has_bias, peer != FLEX


def run(seconds: float) -> list[Record]:
    records = []
    for length in tqdm(LENGTHS, desc="alibi_attention", unit="length"):
        problem = problem_of(length)
        case = Case(problem, "a", CPU)
        detached = [tensor.detach() for tensor in case.inputs]
        for name, attend, has_bias, has_backward in implementations(problem):
            error = case.expected.errors(attend(*detached))["out"] if has_bias else None
            for work in (FORWARD, BOTH) if has_backward else (FORWARD,):
                records.append(
                    measure(
                        call_of(work, attend, case.inputs, case.grad_out),
                        operator="alibi_attention",
                        case=f"{work}, causal, float32 B{problem.batch_size} H{problem.heads} S{length} D64",
                        implementation=name,
                        threads=torch.get_num_threads(),
                        seconds=seconds,
                        max_error=error if work == FORWARD else None,
                    )
                )
    return sorted(records, key=lambda record: record.case)


def pytest_generate_tests(metafunc: Any) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    cases = [(problem, peer) for problem in map(problem_of, LENGTHS, [dtype] * 2) for peer in everyone(problem, device)]
    names = [f"{peer.name}-{problem.length}" for problem, peer in cases]
    metafunc.parametrize("work", [FORWARD, BOTH])
    metafunc.parametrize(("problem", "peer"), cases, ids=names)


def test_attention(benchmark: Any, problem: Problem, peer: Any, work: str) -> None:
    """A call with everything that it waits for, the device included."""
    import pytest  # not needed by `python -m bench`

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    case = Case(problem, "a", device)
    try:
        call = call_of(work, peer.make(problem, device), case.inputs, case.grad_out)
        call()
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"{peer.name} does not serve this: {error}")

    def complete() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()

    benchmark(complete)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="measuring time of each row of the table")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds)
    path = write("cpu_alibi_attention", records)
    print(f"{table(records)}\n\nwritten to {path}")
