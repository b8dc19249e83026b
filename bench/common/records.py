"""Timing, records and tables, shared by every benchmark."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils.benchmark import Timer

import seqwarm_kernels

RESULTS = Path(__file__).parents[1] / "results"


@dataclass(frozen=True)
class Record:
    """One implementation on one case. Times are of one call, in milliseconds."""

    operator: str
    case: str
    implementation: str
    threads: int
    median_ms: float
    iqr_ms: float  #: the middle half of the measurements spans this
    max_error: float | None  #: the largest distance to a float64 computation, over the largest value
    facts: dict[str, Any] = field(default_factory=dict)  #: what the case is, to look it up by


def measure(
    call: Callable[[], object],
    *,
    operator: str,
    case: str,
    implementation: str,
    threads: int,
    seconds: float,
    max_error: float | None = None,
    facts: dict[str, Any] | None = None,
) -> Record:
    """The median over blocks of calls that take `seconds` together, after a warm-up."""
    timer = Timer("call()", globals={"call": call}, num_threads=threads)
    timing = timer.blocked_autorange(min_run_time=seconds)
    return Record(
        operator, case, implementation, threads, timing.median * 1e3, timing.iqr * 1e3, max_error, facts or {}
    )


def environment() -> dict[str, str | None]:
    return {
        "seqwarm_kernels": seqwarm_kernels.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def write(name: str, records: Iterable[Any]) -> Path:
    """bench/results/<name>.jsonl: the environment first, then a line for each record, a dataclass."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    lines = [json.dumps(environment()), *(json.dumps(asdict(record)) for record in records)]
    path.write_text("\n".join(lines) + "\n")
    return path


def table(records: list[Record]) -> str:
    """Markdown, with each case's times relative to its first implementation."""
    lines = [
        "| case | implementation | threads | median ms | spread (IQR) ms | speed of the first = 1 | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for record in records:
        first = next(r for r in records if (r.case, r.threads) == (record.case, record.threads))
        error = "" if record.max_error is None else f"{record.max_error:.1e}"
        lines.append(
            f"| {record.case} | {record.implementation} | {record.threads} | {record.median_ms:.4g} "
            f"| {record.iqr_ms:.2g} | {first.median_ms / record.median_ms:.2f} | {error} |"
        )
    return "\n".join(lines)
