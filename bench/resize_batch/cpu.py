"""resize_batch on the CPU beside the same written by hand, and beside torch's functions for the purpose."""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator

import torch
from tqdm import tqdm

from ..common.records import CpuRecord, in_turns, save, table
from .implementations import BY_HAND, OURS, Resizing, by_hand, implementations, problems
from .report import RECORDS

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
SMALL_MEGABYTES = 1.0  #: a smaller batch is resized so fast that the cost of the call itself counts
#: Sizes that torch.compile is measured at as well. Each size needs a compilation of its own.
COMPILED_AT = [SIZES[1], SIZES[6]]
SECONDS = 0.5  #: of measuring, for each record


#: The measurements of one process: the problem, the implementations, the number of threads, seconds.
Work = tuple[Resizing, list[str], int, float]


def run(seconds: float) -> Iterator[CpuRecord]:
    """Measures every implementation on every problem.

    For small batches the implementations take turns, so that other load on the machine affects all of them equally.
    For large batches each implementation has a process of its own: whether the C library keeps large memory or
    returns it to the system depends on what the process did before, and new memory costs several times as much as a
    copy.
    """
    work: list[Work] = []
    thread_counts = sorted({torch.get_num_threads(), 1}, reverse=True)
    for problem in problems(SIZES):
        size = (problem.tensors, problem.rows, problem.tokens)
        compiled = any(size == known[:3] for known in COMPILED_AT)
        names = list(implementations(problem, problem.batch("meta"), compiled=compiled))
        is_small = problem.facts()["source_megabytes"] < SMALL_MEGABYTES
        together = [names] if is_small else [[name] for name in names]
        work += [(problem, some, threads, seconds) for threads in thread_counts for some in together]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        for records in tqdm(pool.imap(_measure_in_process, work, chunksize=1), total=len(work), desc="resize_batch"):
            yield from records


def _measure_in_process(work: Work) -> list[CpuRecord]:
    problem, names, threads, seconds = work
    torch.set_num_threads(threads)
    batch = problem.batch()
    makers = implementations(problem, batch, compiled=True)
    calls = {name: makers[name]() for name in names}
    expected = by_hand(batch, problem.length, problem.method)
    for name, call in calls.items():
        result: dict[str, torch.Tensor] = call()  # type: ignore[assignment]
        if any(not torch.equal(result[key].view_as(tensor), tensor) for key, tensor in expected.items()):
            raise RuntimeError(f"{name} returns another batch than {BY_HAND}")
    del expected, result
    return list(in_turns(OURS, problem.case(), calls, threads, seconds, problem.facts()))


def main(arguments: argparse.Namespace) -> None:
    save(RECORDS, run(SECONDS), table)
