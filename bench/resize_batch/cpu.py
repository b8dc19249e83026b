"""resize_batch on the CPU beside what people write by hand, and what torch offers for it."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import time
from typing import NamedTuple

import torch
from tqdm import tqdm

from ..common.records import Record, measure, table, write
from ..common.timing import Call, quartiles
from ..cpu_goals import SMALL_MEGABYTES, goals_table
from .implementations import BY_HAND, Resizing, by_hand, implementations, problems

#: tensors, rows, tokens, length
SIZES = [
    (2, 8, 128, 64),
    (3, 8, 128, 64),
    (16, 8, 128, 64),
    (3, 32, 512, 256),
    (3, 4096, 128, 64),
    (3, 8, 32768, 8192),
    (3, 2048, 2048, 1024),
    (2, 256, 32768, 8192),
    (16, 4096, 1024, 512),
]
#: Sizes at which torch.compile is measured as well: it compiles anew for each of them.
COMPILED_AT = [SIZES[1], SIZES[6]]


class Work(NamedTuple):
    """What one process measures."""

    problem: Resizing
    names: list[str]
    threads: int
    seconds: float


def run(seconds: float, quick: bool) -> list[Record]:
    """Small batches by all implementations in turn, so that what else the machine does hits all alike. For the others
    a process of its own: the C library keeps large memory, or gives it back to the system, by what the process did
    before, and new memory costs several times what a copy does."""
    work = []
    for problem in problems([SIZES[1], SIZES[6]] if quick else SIZES):
        size = (problem.tensors, problem.rows, problem.tokens)
        compiled = not quick and any(size == known[:3] for known in COMPILED_AT)
        names = list(implementations(problem, problem.batch("meta"), compiled=compiled))
        together = [names] if _is_small(problem) else [[name] for name in names]
        work += [Work(problem, some, threads, seconds) for threads in _thread_counts() for some in together]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = list(tqdm(pool.imap(_measure_alone, work, chunksize=1), total=len(work), desc="resize_batch"))
    return sorted(itertools.chain.from_iterable(found), key=lambda record: record.case)


def _thread_counts() -> list[int]:
    return sorted({torch.get_num_threads(), 1}, reverse=True)


def _is_small(problem: Resizing) -> bool:
    return problem.facts()["source_megabytes"] < SMALL_MEGABYTES


def _measure_alone(work: Work) -> list[Record]:
    torch.set_num_threads(work.threads)
    batch = work.problem.batch()
    makers = implementations(work.problem, batch, compiled=True)
    calls = {name: makers[name]() for name in work.names}
    records = _in_turn(work, calls) if _is_small(work.problem) else [_over_time(work, *next(iter(calls.items())))]
    expected = by_hand(batch, work.problem.length, work.problem.method)
    for name, call in calls.items():
        result: dict[str, torch.Tensor] = call()  # type: ignore[assignment]
        if any(not torch.equal(result[key].view_as(tensor), tensor) for key, tensor in expected.items()):
            raise RuntimeError(f"{name} gives another batch than {BY_HAND}")
    return records


def _in_turn(work: Work, calls: dict[str, Call]) -> list[Record]:
    """The median of 1000 calls of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(1100):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_ >= 100:
                times[name].append((time.perf_counter() - start) * 1e3)
    timings = {name: quartiles(found) for name, found in times.items()}
    return [
        Record(
            "resize_batch", work.problem.case(), name, work.threads, timing.median, timing.high - timing.low, None,
            work.problem.facts(),
        )
        for name, timing in timings.items()
    ]  # fmt: skip


def _over_time(work: Work, name: str, call: Call) -> Record:
    return measure(
        call,
        operator="resize_batch",
        case=work.problem.case(),
        implementation=name,
        threads=work.threads,
        seconds=work.seconds,
        facts=work.problem.facts(),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time of each row of the table")
    parser.add_argument("--quick", action="store_true", help="two sizes only, without torch.compile")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds, arguments.quick)
    path = write("cpu_resize_batch", records)
    print(f"{table(records)}\n\n{goals_table(records)}\n\nwritten to {path}")
