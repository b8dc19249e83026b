"""The cost of TrainingMonitor on the CPU as a share of a training step, compared with reading an optimizer by hand.

A time is the mean over the steps from one reading to the next, including the writing of records. Tables give medians
over repeats.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm

from seqwarm_kernels.diagnostics import JsonLines, TrainingMonitor

from ..common.records import CpuRecord, markdown, save
from ..common.timing import quartiles
from .trainings import Training, read_by_hand, read_fused, relative_error

RECORDS = "cpu_diagnostics"  #: name of the records file
STEP, MONITOR, BY_HAND = "training step", "TrainingMonitor", ".item() of each tensor"
#: Layers, heads and width of the demo's GPT; rows of a batch; its full length, and the first length of its ramp.
MODEL, ROWS, LENGTHS = (4, 4, 112), 16, (256, 32)
#: Number of steps in a repeat. One of them reads and writes the numbers of all.
READ_EVERY = 20
REPEATS = 15  #: means of `READ_EVERY` training steps at each length


def measure_at(length: int, repeats: int) -> list[CpuRecord]:
    training = Training(*MODEL, ROWS, length, torch.device("cpu"))
    times: dict[str, list[float]] = {STEP: [], MONITOR: [], BY_HAND: []}
    with tempfile.TemporaryDirectory() as folder:
        output = JsonLines(Path(folder) / "monitor.jsonl")
        with TrainingMonitor(training.optimizer, output, read_every=READ_EVERY) as monitor:
            for repeat in tqdm(range(repeats + 1), desc=f"length {length}"):
                means = _means(training, monitor)
                for name in times if repeat else ():  # the first warms up
                    times[name].append(1e3 * means[name])
    readers = {MONITOR: read_fused, BY_HAND: read_by_hand}
    optimizer = training.optimizer
    errors = {name: relative_error(optimizer, read(optimizer)) for name, read in readers.items()}
    case = f"{training.parameters / 1e6:.2f} M parameters, {ROWS} x {length} tokens"
    timings = {name: quartiles(found) for name, found in times.items()}
    facts = {"parameters": training.parameters, "rows": ROWS, "length": length, "steps_of_a_mean": READ_EVERY}
    records = []
    for name, timing in timings.items():
        own = {**facts, "repeats": repeats, "share_of_step": timing.median / timings[STEP].median}
        threads = torch.get_num_threads()
        records.append(CpuRecord("diagnostics", case, name, threads, timing.median, timing.iqr, errors.get(name), own))
    return records


def _means(training: Training, monitor: TrainingMonitor) -> dict[str, float]:
    """Mean seconds over READ_EVERY steps. After each step both ways of reading run, in alternating order."""
    seconds = {STEP: 0.0, MONITOR: 0.0, BY_HAND: 0.0}
    for number in range(READ_EVERY):
        start = time.perf_counter()
        loss, _ = training.step()
        seconds[STEP] += time.perf_counter() - start
        readers: dict[str, Callable[[], object]] = {
            MONITOR: lambda loss=loss: monitor.observe(loss),  # type: ignore[misc]
            BY_HAND: lambda: read_by_hand(training.optimizer),
        }
        for name in (MONITOR, BY_HAND) if number % 2 else (BY_HAND, MONITOR):
            start = time.perf_counter()
            readers[name]()
            seconds[name] += time.perf_counter() - start
    return {name: total / READ_EVERY for name, total in seconds.items()}


def share_table(records: list[CpuRecord]) -> str:
    rows = []
    for record in records:
        error = "" if record.max_error is None else f"{record.max_error:.1e}"
        times = f"{record.median_ms:.4g}", f"{record.iqr_ms:.2g}", f"{record.facts['share_of_step']:.2%}"
        rows.append([record.case, record.implementation, record.threads, *times, error])
    header = ["case", "measured", "threads", "median ms", "spread (IQR) ms", "share of the step"]
    return markdown([*header, "largest relative error"], rows)


def main(arguments: argparse.Namespace) -> None:
    measured = (record for length in LENGTHS for record in measure_at(length, REPEATS))
    save(RECORDS, measured, share_table)
