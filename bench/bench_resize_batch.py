"""resize_batch on the CPU beside what people write by hand, and what torch offers for it."""

from __future__ import annotations

import argparse
import multiprocessing

import torch
from tqdm import tqdm

from .cpu_goals import SMALL_MEGABYTES, goals_table
from .measure import Record, measure, table, write
from .resizing import BY_HAND, Resizing, by_hand, implementations, problems
from .timing import Call, host_time

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


def run(seconds: float, quick: bool) -> list[Record]:
    """Each implementation in a process of its own: the C library keeps large memory, or gives it back to the system, by
    what the process did before, and new memory costs several times what a copy does."""
    sizes = [SIZES[1], SIZES[6]] if quick else SIZES
    work = []
    for problem in problems(sizes):
        size = (problem.tensors, problem.rows, problem.tokens)
        compiled = not quick and any(size == known[:3] for known in COMPILED_AT)
        names = implementations(problem, problem.batch("meta"), compiled=compiled)
        work += [(problem, name, threads, seconds) for name in names for threads in thread_counts()]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        return list(tqdm(pool.imap(_measure_alone, work, chunksize=1), total=len(work), desc="resize_batch"))


def thread_counts() -> list[int]:
    return sorted({torch.get_num_threads(), 1}, reverse=True)


def _measure_alone(work: tuple[Resizing, str, int, float]) -> Record:
    problem, name, threads, seconds = work
    torch.set_num_threads(threads)
    batch = problem.batch()
    call = implementations(problem, batch, compiled=True)[name]()
    record = _measure(problem, name, call, threads, seconds)
    result: dict[str, torch.Tensor] = call()  # type: ignore[assignment]
    expected = by_hand(batch, problem.length, problem.method)
    if any(not torch.equal(result[key].view_as(tensor), tensor) for key, tensor in expected.items()):
        raise RuntimeError(f"{name} gives another batch than {BY_HAND}")
    return record


def _measure(problem: Resizing, name: str, call: Call, threads: int, seconds: float) -> Record:
    """Small batches by the median of 1000 calls, so that what each call waits for counts; others over `seconds`."""
    facts = problem.facts()
    if facts["source_megabytes"] > SMALL_MEGABYTES:
        return measure(
            call,
            operator="resize_batch",
            case=problem.case(),
            implementation=name,
            threads=threads,
            seconds=seconds,
            facts=facts,
        )
    timing = host_time(call, 1000)
    return Record("resize_batch", problem.case(), name, threads, timing.median, timing.high - timing.low, None, facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time of each row of the table")
    parser.add_argument("--quick", action="store_true", help="two sizes only, without torch.compile")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds, arguments.quick)
    path = write("cpu_resize_batch", records)
    print(f"{table(records)}\n\n{goals_table(records)}\n\nwritten to {path}")
