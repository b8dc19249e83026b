"""Records of a run on a GPU: appended as they come, so that a run that is cut off leaves what it has."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import triton.testing

from .measure import environment


@dataclass(frozen=True)
class DeviceRecord:
    """One implementation on one case. Times are of one call, in milliseconds: the median and the middle half."""

    stage: str
    case: str
    work: str
    implementation: str
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    problem: str | None = None  #: why there is no time


def device_environment() -> dict[str, str | None]:
    found = {**environment(), "triton": triton.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["driver"] = torch.cuda.driver_version() if hasattr(torch.cuda, "driver_version") else None
    return found


class Recorder:
    """Writes records to a file as they come, until the time is over."""

    def __init__(self, path: Path, seconds: float) -> None:
        self.path, self.records = path, list[DeviceRecord]()
        self._end = time.monotonic() + seconds
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(device_environment()) + "\n")

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def add(self, record: DeviceRecord) -> DeviceRecord:
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        return record

    def measure(self, stage: str, case: str, work: str, implementation: str, make: Callable[[], Any]) -> DeviceRecord:
        """Of what `make` gives: a call, and what to note beside its times. A failure is a record too."""
        if self.seconds_left() <= 0:
            return self.add(DeviceRecord(stage, case, work, implementation, problem="out of time"))
        try:
            call, figures = make()
            low, median, high = quartiles(call)
            return self.add(DeviceRecord(stage, case, work, implementation, median, low, high, figures))
        except Exception as error:  # a peer that fails here must not end the run
            text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            return self.add(DeviceRecord(stage, case, work, implementation, problem=text))


def quartiles(call: Callable[[], object], repeat_ms: int = 150) -> tuple[float, float, float]:
    """Of the time on the device, with a cold L2 before every call; on a CPU, of a few calls."""
    if torch.cuda.is_available():
        return tuple(triton.testing.do_bench(call, warmup=30, rep=repeat_ms, quantiles=[0.25, 0.5, 0.75]))
    return host_quartiles(call, 3)


def host_quartiles(call: Callable[[], object], repeats: int) -> tuple[float, float, float]:
    """Of the time that the caller waits, without waiting for the device."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    low, median, high = torch.tensor(times, dtype=torch.float64).quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    )
    return low.item(), median.item(), high.item()
