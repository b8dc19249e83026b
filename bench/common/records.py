"""Records of CPU benchmarks: one line of JSON for each measurement, and their table in Markdown."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import seqwarm_kernels
from seqwarm_kernels.cli.info import cpu_name
from seqwarm_kernels.utils.files import PARTIAL_SUFFIX

from .timing import Call, measure_in_turns

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
FIGURES = ROOT / "docs" / "figures"


@dataclass(frozen=True)
class CpuRecord:
    """One implementation on one case. Times are milliseconds of one call."""

    operator: str
    case: str
    implementation: str
    threads: int
    median_ms: float
    iqr_ms: float  #: interquartile range
    max_error: float | None  #: largest distance to a float64 computation, divided by the largest value
    facts: dict[str, Any] = field(default_factory=dict)  #: properties of the case, used to look the record up


def is_implementation(name: str, wanted: str) -> bool:
    """Whether the names are equal, with the backend in `name` or without it."""
    return wanted in (name, name.replace(" native", "").replace(" triton", ""))


def cpu_kind() -> str:
    """The vendor and the instructions that decide how attention multiplies: "intel-amx", "amd-avx512_bf16", ..."""
    name = cpu_name().lower()
    vendor = next((vendor for vendor in ("intel", "amd") if vendor in name), platform.machine())
    if torch.cpu._is_amx_tile_supported():
        return f"{vendor}-amx"
    if torch.cpu._is_avx512_bf16_supported():
        return f"{vendor}-avx512_bf16"
    return f"{vendor}-{torch.backends.cpu.get_cpu_capability().lower()}"


def environment() -> dict[str, str | None]:
    return {
        "seqwarm_kernels": seqwarm_kernels.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def write(name: str, records: Iterable[Any]) -> tuple[Path, list[Any]]:
    """Writes bench/results/<name>.jsonl: first a line with the environment, then a line for each dataclass.

    Each record is written as soon as it is measured, to <name>.jsonl.partial, which gets its name at the end. After an
    interruption the partial file holds the records so far, and <name>.jsonl is unchanged.

    Returns:
        The path, and the records.
    """
    RESULTS.mkdir(exist_ok=True)
    path, partial = RESULTS / f"{name}.jsonl", RESULTS / f"{name}.jsonl{PARTIAL_SUFFIX}"
    written = []
    with partial.open("w") as file:
        print(json.dumps(environment()), file=file, flush=True)
        for record in records:
            print(json.dumps(record if isinstance(record, dict) else asdict(record)), file=file, flush=True)
            written.append(record)
    partial.replace(path)
    return path, written


def save(name: str, records: Iterable[Any], *tables: Callable[[list[Any]], str]) -> None:
    """Writes records as they are measured, and prints their tables."""
    path, written = write(name, records)
    print("\n\n".join([*(table(written) for table in tables), f"written to {path}"]))


def in_turns(
    operator: str,
    case: str,
    calls: Mapping[str, Call],
    threads: int,
    seconds: float,
    facts: dict[str, Any],
    errors: Mapping[str, float] | None = None,
) -> Iterator[CpuRecord]:
    """A record of each call. They take turns, so that all have the machine in the same states."""
    for name, timing in measure_in_turns(calls, threads, seconds).items():
        error = (errors or {}).get(name)
        yield CpuRecord(operator, case, name, threads, timing.median, timing.iqr, error, facts)


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The environment and the records that `write` wrote."""
    first, *lines = path.read_text().splitlines()
    return json.loads(first), [json.loads(line) for line in lines]


def markdown(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (header, ["---"] * len(header), *rows))


def figures_text(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())


def lines_table(lines: Sequence[dict[str, Any]]) -> str:
    """A column for each name, and a row for each line."""
    names = list(dict.fromkeys(name for line in lines for name in line))
    return markdown(names, ([_cell(line.get(name, "")) for name in names] for line in lines))


def _cell(value: object) -> object:
    if isinstance(value, dict):
        return figures_text(value)
    return f"{value:.4g}" if isinstance(value, float) else value


def table(records: list[CpuRecord]) -> str:
    """A Markdown table by case, with the speed of each implementation relative to the first one of its case."""
    records = sorted(records, key=lambda record: record.case)
    rows = []
    for record in records:
        first = next(r for r in records if (r.case, r.threads) == (record.case, record.threads))
        error = "" if record.max_error is None else f"{record.max_error:.1e}"
        times = f"{record.median_ms:.4g}", f"{record.iqr_ms:.2g}", f"{first.median_ms / record.median_ms:.2f}"
        rows.append([record.case, record.implementation, record.threads, *times, error])
    header = ["case", "implementation", "threads", "median ms", "spread (IQR) ms", "speed of the first = 1", "error"]
    return markdown(header, rows)
