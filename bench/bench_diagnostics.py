"""What TrainingMonitor costs on the CPU, as a share of a training step, beside reading an optimizer by hand."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from tqdm import tqdm

from seqwarm_kernels.diagnostics import TrainingMonitor, moment_statistics

from .measure import Record, write
from .monitored import Training, exactly, read_by_hand
from .timing import quartiles

STEP, MONITOR, BY_HAND = "training step", "TrainingMonitor", ".item() of each tensor"
#: Layers, heads, width of the demo's GPT, and rows and lengths of a batch: its full length, and the first of its ramp.
MODEL, ROWS, LENGTHS = (4, 4, 112), 16, (256, 32)


def measure_at(length: int, rounds: int) -> list[Record]:
    """Steps, each followed by both ways of reading, in turn the one or the other first."""
    training = Training(*MODEL, ROWS, length, torch.device("cpu"))
    monitor = TrainingMonitor(training.optimizer, lambda record: None)
    times: dict[str, list[float]] = {STEP: [], MONITOR: [], BY_HAND: []}
    for round_ in tqdm(range(rounds + 3), desc=f"length {length}"):
        start = time.perf_counter()
        loss, _ = training.step()
        times[STEP].append(time.perf_counter() - start)
        readers: dict[str, Callable[[], object]] = {
            MONITOR: lambda loss=loss: monitor.observe(loss),  # type: ignore[misc]
            BY_HAND: lambda: read_by_hand(training.optimizer),
        }
        for name in (MONITOR, BY_HAND) if round_ % 2 else (BY_HAND, MONITOR):
            start = time.perf_counter()
            readers[name]()
            times[name].append(time.perf_counter() - start)
    errors = _errors(training)
    case = f"{training.parameters / 1e6:.2f} M parameters, {ROWS} x {length} tokens"
    return [_record(case, name, times, errors.get(name), training.parameters, length) for name in times]


def _errors(training: Training) -> dict[str, float]:
    exact = exactly(training.optimizer)
    found = {
        MONITOR: [value.item() for value in moment_statistics(training.optimizer) if value is not None],
        BY_HAND: read_by_hand(training.optimizer),
    }
    return {
        name: max(abs(value - wanted) / wanted for value, wanted in zip(values, exact, strict=True))
        for name, values in found.items()
    }


def _record(
    case: str, name: str, times: dict[str, list[float]], error: float | None, parameters: int, length: int
) -> Record:
    timing, step = (quartiles([1e3 * seconds for seconds in times[which][3:]]) for which in (name, STEP))
    facts = {"parameters": parameters, "rows": ROWS, "length": length, "share_of_step": timing.median / step.median}
    spread = timing.high - timing.low
    return Record("diagnostics", case, name, torch.get_num_threads(), timing.median, spread, error, facts)


def share_table(records: list[Record]) -> str:
    lines = [
        "| case | what | threads | median ms | spread (IQR) ms | share of the step | largest relative error |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        error = "" if record.max_error is None else f"{record.max_error:.1e}"
        lines.append(
            f"| {record.case} | {record.implementation} | {record.threads} | {record.median_ms:.4g} "
            f"| {record.iqr_ms:.2g} | {record.facts['share_of_step']:.2%} | {error} |"
        )
    return "\n".join(lines)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=200, help="training steps at each length")


def main(arguments: argparse.Namespace) -> None:
    records = [record for length in LENGTHS for record in measure_at(length, arguments.rounds)]
    path = write("cpu_diagnostics", records)
    print(f"{share_table(records)}\n\nwritten to {path}")
