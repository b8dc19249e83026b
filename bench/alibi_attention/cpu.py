"""alibi_attention on the CPU beside torch's ways to compute attention with ALiBi, or causal attention without bias."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

import torch
from tqdm import tqdm

from ..common.goals import goals_table
from ..common.records import CpuRecord, in_turns, save, table
from ..common.timing import extra_resident_bytes
from .cases import BOTH, FORWARD, Case, call_of
from .peers import EAGER, FLASH, FLEX, MASK, OURS, Attend, Peer, ours, reference
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
SECONDS = 1.0  #: of measuring, for each record


def problem_of(length: int, head_dim: int = 64, dtype: torch.dtype = torch.float32) -> Problem:
    return Problem(max(1, TOKENS // length), HEADS, HEADS, length, head_dim, dtype=dtype)


def all_problems() -> list[Problem]:
    """The problems of the goals, and then the others."""
    first = [problem_of(1024), problem_of(1024, dtype=torch.bfloat16), LONG, SEGMENTS]
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


def measure(problem: Problem, inputs: str, peers: list[Peer], threads: int, seconds: float) -> list[CpuRecord]:
    """A forward, and a forward with its backward where that is neither missing nor slow."""
    torch.set_num_threads(threads)
    case = Case(problem, inputs, CPU)
    detached = [tensor.detach() for tensor in case.inputs]
    peaks = {}
    if problem == LONG:  # the memory of the mask, if there is one, and of the output
        for peer in peers:
            if peer.name in WITH_MEMORY:
                peaks[peer.name] = extra_resident_bytes(lambda peer=peer: peer.make(problem, CPU)(*detached))  # type: ignore[misc]
    attends = {peer.name: peer.make(problem, CPU) for peer in peers}
    errors = {peer.name: case.exact.errors(attends[peer.name](*detached))["out"] for peer in peers if peer.has_bias}
    facts = {**problem.facts(), "dtype": str(problem.dtype), "inputs": inputs}

    def timed(work: str, attends: dict[str, Attend], errors: dict[str, float]) -> Iterator[CpuRecord]:
        calls = {name: call_of(work, attend, case.inputs, case.grad_out) for name, attend in attends.items()}
        title = case_of(problem, work, inputs)
        return in_turns(OURS, title, calls, threads, seconds, {**facts, "work": work}, errors)

    found = []
    for each in timed(FORWARD, attends, errors):
        if each.median_ms >= LONGEST_MS or each.implementation == FLEX.name:  # which has no backward on CPUs
            del attends[each.implementation]
        peak = peaks.get(each.implementation)
        found.append(each if peak is None else replace(each, facts={**each.facts, "peak_megabytes": peak / 1e6}))
    return [*found, *timed(BOTH, attends, {})]


def run(seconds: float) -> Iterator[CpuRecord]:
    most_threads = torch.get_num_threads()
    slow: set[tuple[Problem, str]] = set()  # to be left out with one thread
    for threads in sorted({most_threads, 1}, reverse=True):
        for problem in tqdm(all_problems(), desc=f"alibi_attention, {threads} threads", unit="problem"):
            peers = [peer for peer in peers_of(problem) if (problem, peer.name) not in slow]
            records = measure(problem, "a", peers, threads, seconds)
            yield from records
            slow |= {(problem, each.implementation) for each in records if each.median_ms > LONGEST_MS / 4}
            if threads == most_threads and problem.dtype == torch.float32 and problem.segment_length is None:
                yield from measure(problem, "b", ours(CPU, problem.dtype), threads, seconds)
    torch.set_num_threads(most_threads)


def main(arguments: argparse.Namespace) -> None:
    save(RECORDS, run(SECONDS), table, lambda records: goals_table(cpu_goals(records)))
