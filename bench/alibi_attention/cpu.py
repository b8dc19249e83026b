"""alibi_attention on the CPU beside torch's ways to compute attention with ALiBi, or causal attention without bias."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from ..common.goals import goals_table
from ..common.records import CpuRecord, table, write
from ..common.timing import Call, extra_resident_bytes, measure_cpu
from .cases import BOTH, FORWARD, Case, call_of
from .peers import EAGER, FLASH, FLEX, MASK, OURS, Peer, ours, reference
from .problems import Problem
from .report import RECORDS, cpu_goals

CPU = torch.device("cpu")
LENGTHS = (64, 256, 1024, 4096, 16384)
HEADS = 12
#: Tokens of a batch: two rows of 1024, or other rows with as many tokens. A longer row is a batch of its own.
TOKENS = 2048
LONG = Problem(1, HEADS, HEADS, 8192, 64, dtype=torch.float32)
SEGMENTS = Problem(1, HEADS, HEADS, 16384, 64, segment_length=16, dtype=torch.float32)
#: Peers with larger scores or a larger mask are left out.
MOST_SCORE_BYTES = {MASK.name: 2**32, EAGER.name: 2**31, reference().name: 2**28}
WITH_MEMORY = (f"{OURS} native", MASK.name)
#: If a forward takes longer, its backward is not measured, and nothing is measured with one thread.
LONGEST_MS = 2000


def problem_of(length: int, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(max(1, TOKENS // length), HEADS, HEADS, length, head_dim, dtype=dtype)


def problems_of(quick: bool) -> list[Problem]:
    """The problems of the goals, and then the others."""
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
    references = [] if problem.segment_length is not None else [reference()]  # it computes all scores of a row
    for peer in (*ours(CPU, problem.dtype), FLEX, FLASH, MASK, EAGER, *references):
        if problem.score_bytes() <= MOST_SCORE_BYTES.get(peer.name, float("inf")):
            yield peer


def case_of(problem: Problem, work: str, inputs: str) -> str:
    dtype = str(problem.dtype).removeprefix("torch.")
    return f"{work}, {problem.case()}, {dtype}{', inputs b' if inputs == 'b' else ''}"


class Measurements:
    """Measures and collects records.

    Args:
        seconds: Measuring time of each record.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.records: list[CpuRecord] = []

    def add(self, case: Case, peer: Peer, threads: int) -> list[CpuRecord]:
        """Measures a forward, and a forward with its backward if the peer has a backward. Returns the new records."""
        before = len(self.records)
        torch.set_num_threads(threads)
        detached = [tensor.detach() for tensor in case.inputs]
        facts = {}
        if case.problem == LONG and peer.name in WITH_MEMORY:
            # The memory of the mask, if there is one, and of the output.
            peak = extra_resident_bytes(lambda: peer.make(case.problem, CPU)(*detached))
            facts = {} if peak is None else {"peak_megabytes": peak / 1e6}
        attend = peer.make(case.problem, CPU)
        error = case.exact.errors(attend(*detached))["out"] if peer.has_bias else None
        call = call_of(FORWARD, attend, case.inputs, case.grad_out)
        forward = self._measure(case, peer, threads, FORWARD, call, error, facts)
        if peer != FLEX and forward.median_ms < LONGEST_MS:  # FlexAttention has no backward on CPUs
            self._measure(case, peer, threads, BOTH, call_of(BOTH, attend, case.inputs, case.grad_out), None, {})
        return self.records[before:]

    def _measure(
        self, case: Case, peer: Peer, threads: int, work: str, call: Call, error: float | None, facts: dict[str, Any]
    ) -> CpuRecord:
        facts = {
            **case.problem.facts(), "dtype": str(case.problem.dtype), "work": work, "inputs": case.kind, **facts,
        }  # fmt: skip
        timing = measure_cpu(call, threads, self.seconds)
        name = case_of(case.problem, work, case.kind)
        record = CpuRecord(OURS, name, peer.name, threads, timing.median, timing.iqr, error, facts)
        self.records.append(record)
        tqdm.write(f"{name}, {peer.name}, {threads} threads: {timing.median:.4g} ms", file=sys.stderr)
        return record

    def is_slow(self, problem: Problem, peer: Peer) -> bool:
        same = [r for r in self.records if r.case == case_of(problem, FORWARD, "a") and r.implementation == peer.name]
        return any(record.median_ms > LONGEST_MS / 4 for record in same)


def run(seconds: float, quick: bool) -> Iterator[CpuRecord]:
    most_threads = torch.get_num_threads()
    found = Measurements(seconds)
    problems = problems_of(quick)
    for threads in sorted({most_threads, 1}, reverse=True):
        for problem in tqdm(problems, desc=f"alibi_attention, {threads} threads", unit="problem"):
            case = Case(problem, "a", CPU)
            for peer in peers_of(problem):
                if threads == most_threads or not found.is_slow(problem, peer):
                    yield from found.add(case, peer, threads)
            if threads == most_threads and problem.dtype == torch.float32 and problem.segment_length is None:
                for peer in ours(CPU, problem.dtype):
                    yield from found.add(Case(problem, "b", CPU), peer, threads)
    torch.set_num_threads(most_threads)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=1.0, help="time of a record (default: %(default)s seconds)")
    quick = "measure only rows of 1,024 and 8,192 tokens, and segments of 16 tokens"
    parser.add_argument("--quick", action="store_true", help=quick)


def main(arguments: argparse.Namespace) -> None:
    path, records = write(RECORDS, run(arguments.seconds, arguments.quick), quick=arguments.quick)
    print(f"{table(records)}\n\n{goals_table(cpu_goals(records))}\n\nwritten to {path}")
