"""resize_batch on the CPU beside what people write by hand, and what torch offers for it."""

from __future__ import annotations

import argparse

import torch
from tqdm import tqdm

from .cpu_goals import SMALL_MEGABYTES, goals_table
from .measure import Record, measure, table, write
from .resizing import OURS, Resizing, implementations, problems
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
    most_threads = torch.get_num_threads()
    records: list[Record] = []
    sizes = [SIZES[1], SIZES[6]] if quick else SIZES
    for problem in tqdm(list(problems(sizes)), desc="resize_batch", unit="case"):
        batch = problem.batch()
        size = (problem.tensors, problem.rows, problem.tokens)
        compiled = not quick and any(size == known[:3] for known in COMPILED_AT)
        expected = None
        for name, make in implementations(problem, batch, compiled=compiled).items():
            call = make()
            expected = _checked(name, call, expected)
            for threads in sorted({most_threads, 1}, reverse=True):
                records.append(_measure(problem, name, call, threads, seconds))
        torch.set_num_threads(most_threads)
    return records


def _checked(name: str, call: Call, expected: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """All give the same batch."""
    result: dict[str, torch.Tensor] = call()  # type: ignore[assignment]
    if expected is not None and any(not torch.equal(result[key], tensor) for key, tensor in expected.items()):
        raise RuntimeError(f"{name} gives another batch than {OURS}")
    return expected or {key: tensor.clone() for key, tensor in result.items()}


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
    torch.set_num_threads(threads)
    timing = host_time(call, 1000)
    return Record("resize_batch", problem.case(), name, threads, timing.median, timing.high - timing.low, None, facts)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0.5, help="measuring time of each row of the table")
    parser.add_argument("--quick", action="store_true", help="two sizes only, without torch.compile")


def main(arguments: argparse.Namespace) -> None:
    records = run(arguments.seconds, arguments.quick)
    path = write("cpu_resize_batch", records)
    print(f"{table(records)}\n\n{goals_table(records)}\n\nwritten to {path}")
