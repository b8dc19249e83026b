"""alibi_attention on the CPU beside the ways to get ALiBi, or at least causal attention, from torch itself.

With pytest-benchmark, on a GPU where there is one: `pytest bench/bench_alibi_attention.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from ..common.records import Record, measure, table, write
from ..common.timing import peak_extra_bytes
from ..cpu_goals import goals_table
from .gpu import BOTH, FORWARD, Case, call_of
from .peers import EAGER, FLASH, FLEX, MASK, Peer, everyone, ours, reference
from .problems import Problem

CPU = torch.device("cpu")
LENGTHS = (64, 256, 1024, 4096, 16384)
HEADS = 12
#: Two rows of 1024 tokens, or as many tokens in other rows, or one longer row.
TOKENS = 2048
LONG = Problem(1, HEADS, HEADS, 8192, 64, dtype=torch.float32)
SEGMENTS = Problem(1, HEADS, HEADS, 16384, 64, segment_length=16, dtype=torch.float32)
#: Peers with scores or a mask larger than this are left out.
MOST_SCORE_BYTES = {MASK.name: 2**32, EAGER.name: 2**31, reference().name: 2**28}
WITH_MEMORY = ("alibi_attention native", MASK.name)
#: A forward that takes this long is not measured with its backward, nor anything that takes this long with one thread.
LONGEST_MS = 2000


def problem_of(length: int, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(max(1, TOKENS // length), HEADS, HEADS, length, head_dim, dtype=dtype)


def problems_of(quick: bool) -> list[Problem]:
    """What the goals are about first."""
    first = [problem_of(1024), problem_of(1024, dtype=torch.bfloat16), LONG, SEGMENTS]
    if quick:
        return first
    every = [
        problem_of(length, head_dim, dtype)
        for dtype in (torch.float32, torch.bfloat16)
        for head_dim in (64, 128)
        for length in LENGTHS
    ]
    return first + [problem for problem in every if problem not in first]


def peers_of(problem: Problem) -> Iterator[Peer]:
    definition = [] if problem.segment_length is not None else [reference()]  # it has all scores of a row
    for peer in (*ours(CPU, problem.dtype), FLEX, FLASH, MASK, EAGER, *definition):
        score_bytes = problem.heads * problem.length * (problem.segment_length or problem.length) * 4
        if score_bytes <= MOST_SCORE_BYTES.get(peer.name, float("inf")):
            yield peer


def case_of(problem: Problem, work: str, inputs: str) -> str:
    dtype = str(problem.dtype).removeprefix("torch.")
    return f"{work}, {problem.case()}, {dtype}{', inputs b' if inputs == 'b' else ''}"


class Run:
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.records: list[Record] = []

    def measure(self, case: Case, peer: Peer, threads: int) -> None:
        """Forward, and with its backward where there is one."""
        torch.set_num_threads(threads)
        detached = [tensor.detach() for tensor in case.inputs]
        peak = None
        if case.problem == LONG and peer.name in WITH_MEMORY:  # with a mask, if it needs one, and the output
            peak = peak_extra_bytes(lambda: peer.make(case.problem, CPU)(*detached))
        attend = peer.make(case.problem, CPU)
        error = case.expected.errors(attend(*detached))["out"] if peer.has_bias else None
        call = call_of(FORWARD, attend, case.inputs, case.grad_out)
        forward = self._time(case, peer, threads, FORWARD, call, error, peak)
        if peer != FLEX and forward.median_ms < LONGEST_MS:  # Flex has no backward on CPUs
            self._time(case, peer, threads, BOTH, call_of(BOTH, attend, case.inputs, case.grad_out))

    def _time(
        self,
        case: Case,
        peer: Peer,
        threads: int,
        work: str,
        call: Any,
        error: float | None = None,
        peak: int | None = None,
    ) -> Record:
        facts = {**case.problem.facts(), "dtype": str(case.problem.dtype), "work": work, "inputs": case.kind}
        if peak is not None:
            facts["peak_megabytes"] = peak / 1e6
        record = measure(
            call,
            operator="alibi_attention",
            case=case_of(case.problem, work, case.kind),
            implementation=peer.name,
            threads=threads,
            seconds=self.seconds,
            max_error=error,
            facts=facts,
        )
        self.records.append(record)
        return record

    def is_slow(self, problem: Problem, peer: Peer) -> bool:
        same = [r for r in self.records if r.case == case_of(problem, FORWARD, "a") and r.implementation == peer.name]
        return any(record.median_ms > LONGEST_MS / 4 for record in same)


def run(seconds: float, quick: bool) -> list[Record]:
    most_threads = torch.get_num_threads()
    found = Run(seconds)
    problems = problems_of(quick)
    for threads in sorted({most_threads, 1}, reverse=True):
        for problem in tqdm(problems, desc=f"alibi_attention, {threads} threads", unit="problem"):
            case = Case(problem, "a", CPU)
            for peer in peers_of(problem):
                if threads == most_threads or not found.is_slow(problem, peer):
                    found.measure(case, peer, threads)
            if threads == most_threads and problem.dtype == torch.float32 and problem.segment_length is None:
                for peer in ours(CPU, problem.dtype):
                    found.measure(Case(problem, "b", CPU), peer, threads)
    torch.set_num_threads(most_threads)
    return sorted(found.records, key=lambda record: record.case)


def pytest_generate_tests(metafunc: Any) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problems = [replace(problem_of(length), dtype=dtype) for length in (128, 1024)]
    cases = [(problem, peer) for problem in problems for peer in everyone(problem, device)]
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
    parser.add_argument("--quick", action="store_true", help="only the problems that the goals are about")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds, arguments.quick)
    path = write("cpu_alibi_attention", records)
    print(f"{table(records)}\n\n{goals_table(records)}\n\nwritten to {path}")
