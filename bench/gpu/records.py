"""Records of a GPU run. Each record is appended to a file at once, so that an interrupted run keeps its records."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from ..common.records import environment, is_implementation
from ..common.timing import Call, measure_device

STEPS, TESTS = "steps", "tests"  #: stages without times
DEVICE_LOST = 3  #: exit code of a process whose device no longer answers
_LONGEST = 120.0  # seconds that a measurement may take, compilation included, before its process is killed
_GRACE = 5.0  # seconds that a measurement may take beyond the time limit
_CRASHED = "ended its process"


@dataclass(frozen=True)
class DeviceRecord:
    """One implementation on one case. Times are milliseconds of one call: the median and both quartiles."""

    stage: str
    case: str
    work: str
    implementation: str
    inputs: str = "a"
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  #: properties of the case, used to look the record up
    failure: str | None = None  #: why there is no time

    def key(self) -> tuple[str, ...]:
        return self.stage, self.case, self.work, self.implementation, self.inputs

    def time_text(self) -> str:
        """The median, and both quartiles in parentheses."""
        return "" if self.median_ms is None else f"{self.median_ms:.4g} ({self.low_ms:.3g}–{self.high_ms:.3g})"


def teraflops(record: DeviceRecord | None) -> float | None:
    """TFLOP/s, counted as if no key was skipped."""
    return _per_millisecond(record, "gflop")


def gigabytes_per_second(record: DeviceRecord) -> float | None:
    return _per_millisecond(record, "moved_megabytes")


def _per_millisecond(record: DeviceRecord | None, name: str) -> float | None:
    if record is None or record.median_ms is None or name not in record.figures:
        return None
    return record.figures[name] / record.median_ms


def speedup(record: DeviceRecord | None, other: DeviceRecord | None) -> float | None:
    """Time of `other` divided by the time of `record`."""
    if record is None or other is None or record.median_ms is None or other.median_ms is None:
        return None
    return other.median_ms / record.median_ms


class DeviceRecords:
    """All records of a run, or those of some stages."""

    def __init__(self, records: Iterable[DeviceRecord]) -> None:
        self.all = list(records)

    def of_stages(self, *stages: str) -> DeviceRecords:
        return DeviceRecords(record for record in self.all if record.stage in stages)

    def timed(self, implementation: str, work: str, inputs: str = "a", **facts: Any) -> Iterator[DeviceRecord]:
        """Records that have a time. Facts that are not passed may have any value."""
        for record in self.all:
            same = (record.work, record.inputs) == (work, inputs) and is_implementation(
                record.implementation, implementation
            )
            known = all(record.facts.get(name) == value for name, value in facts.items())
            if same and known and record.median_ms is not None:
                yield record

    def find(self, implementation: str, work: str, inputs: str = "a", **facts: Any) -> DeviceRecord | None:
        """The first of the timed records."""
        return next(self.timed(implementation, work, inputs, **facts), None)

    def beside(self, record: DeviceRecord, implementation: str) -> DeviceRecord | None:
        """The timed record of another implementation on the same case, work and inputs."""
        found = self.of_stages(record.stage).timed(implementation, record.work, record.inputs)
        return next((other for other in found if other.case == record.case), None)

    def copy_rate(self) -> float | None:
        """Bytes that a plain copy reads and writes, in GB/s."""
        rates = [gigabytes_per_second(record) for record in self.of_stages("copy").all]
        return max((rate for rate in rates if rate is not None), default=None)

    def share_of_copy(self, record: DeviceRecord) -> float | None:
        """Memory traffic of the record as a share of the traffic of a plain copy."""
        rate, copied = gigabytes_per_second(record), self.copy_rate()
        return None if rate is None or copied is None else rate / copied


def device_environment() -> dict[str, str | None]:
    found = {
        **environment(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "cuda": torch.version.cuda,
    }
    for package in ("triton", "flash-attn-3", "flash-attn-4", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory >> 30} GiB"
        found["driver, power limit, largest clock"] = _query_driver("driver_version,power.limit,clocks.max.sm")
    return found


def _query_driver(fields: str) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={fields}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or None


def begin(path: Path) -> None:
    """A new file with the environment."""
    path.write_text(json.dumps(device_environment()) + "\n")


def append(path: Path, record: DeviceRecord) -> None:
    with path.open("a") as file:
        file.write(json.dumps(asdict(record)) + "\n")


def read_device_records(path: Path) -> tuple[dict[str, Any], list[DeviceRecord]]:
    """The environment and the last record of each measurement, without lines that were not written completely."""
    first, *lines = path.read_text().splitlines()
    records: dict[tuple[str, ...], DeviceRecord] = {}
    for line in lines:
        with contextlib.suppress(ValueError):
            record = DeviceRecord(**json.loads(line))
            records[record.key()] = record
    return json.loads(first), list(records.values())


def drop_replaced(path: Path) -> None:
    """Leaves the last record of each measurement."""
    environment, records = read_device_records(path)
    path.write_text("".join(json.dumps(line) + "\n" for line in (environment, *map(asdict, records))))


def read_folder(folder: Path) -> tuple[dict[str, dict[str, Any]], DeviceRecords]:
    """The environment of each file, and all records. A later file replaces records of the same measurement."""
    environments: dict[str, dict[str, Any]] = {}
    found: dict[tuple[str, ...], DeviceRecord] = {}
    for path in sorted(folder.glob("device*.jsonl")):
        environments[path.name], records = read_device_records(path)
        found |= {record.key(): record for record in records}
    return environments, DeviceRecords(found.values())


def explain(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


class Recorder:
    """Measures and appends records. Measurements that have a record already are skipped.

    Args:
        path: File of records, which `begin` has made.
        seconds: Time limit. No measurement begins after it.
    """

    def __init__(self, path: Path, seconds: float) -> None:
        self._path = path
        records = read_device_records(path)[1]
        self._recorded = {record.key() for record in records}
        self._crashing = {(r.stage, r.case, r.implementation) for r in records if r.failure == _CRASHED}
        self._end = time.monotonic() + seconds
        self._announced = False

    def seconds_left(self) -> float:
        return self._end - time.monotonic()

    def out_of_time(self) -> bool:
        """Whether the time limit has passed. The first call after it prints a message."""
        over = self.seconds_left() < 0
        if over and not self._announced:
            self._announced = True
            print("out of time: the rest of this stage is not measured", flush=True)
        return over

    def has(self, *key: str) -> bool:
        """Whether there is a record of this stage, case, work, implementation and kind of inputs."""
        return key in self._recorded

    def add(self, record: DeviceRecord) -> None:
        self._recorded.add(record.key())
        append(self._path, record)

    def measure(
        self,
        stage: str,
        case: str,
        work: str,
        implementation: str,
        make: Callable[[], tuple[Call, dict[str, float]]],
        *,
        inputs: str = "a",
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Times a call. A failure is recorded too.

        Args:
            make: Returns the call and the figures to record beside its times.
        """
        key = (stage, case, work, implementation, inputs)
        if key in self._recorded or self.out_of_time() or (stage, case, implementation) in self._crashing:
            return
        append(self._path, DeviceRecord(*key, facts=facts or {}, failure=_CRASHED))  # replaced, unless it does
        faulthandler.dump_traceback_later(min(_LONGEST, self.seconds_left() + _GRACE), exit=True)
        try:
            call, figures = make()
            timing = measure_device(call)
            if timing.host is not None:
                figures = {**figures, "host_ms": timing.host}
            self.add(DeviceRecord(*key, timing.median, timing.low, timing.high, figures=figures, facts=facts or {}))
        except Exception as error:  # one failing implementation must not end the run
            self.add(DeviceRecord(*key, facts=facts or {}, failure=explain(error)))
            exit_if_device_is_lost()
        finally:
            faulthandler.cancel_dump_traceback_later()


def exit_if_device_is_lost() -> None:
    """After an illegal access every CUDA call of this process fails. A new process continues with the next record."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        sys.exit(DEVICE_LOST)
