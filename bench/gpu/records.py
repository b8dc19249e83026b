"""Records of a run on a GPU: appended as they come, so that a run that is cut off leaves what it has."""

from __future__ import annotations

import faulthandler
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import triton

from ..common.records import environment
from ..common.timing import Call, measure

NAME = "device.jsonl"
_BEGUN = "begun.json"  # what was being measured when a process ended
_LONGEST = 120.0  # seconds that a measurement may take, compilation included, before its process is ended
_ENDED = "ended its process"
DEVICE_LOST = 3  #: exit code of a process whose device no longer answers


@dataclass(frozen=True)
class DeviceRecord:
    """One implementation on one case. Times are of one call, in milliseconds: the median and the middle half."""

    stage: str
    case: str
    work: str
    implementation: str
    inputs: str = "a"
    median_ms: float | None = None
    low_ms: float | None = None
    high_ms: float | None = None
    figures: dict[str, float] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)  #: of the case, to look it up by
    failure: str | None = None  #: why there is no time

    def key(self) -> tuple[str, ...]:
        return self.stage, self.case, self.work, self.implementation, self.inputs


def device_environment() -> dict[str, str | None]:
    found = {
        **environment(),
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
    }
    for package in ("flash-attn-4", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties()
        found["gpu"] = f"{properties.name}, {properties.multi_processor_count} SMs, {properties.total_memory >> 30} GiB"
        found["driver, power limit, largest clock"] = _ask_driver("driver_version,power.limit,clocks.max.sm")
    return found


def _ask_driver(what: str) -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={what}", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or None


def read(path: Path) -> tuple[dict[str, Any], list[DeviceRecord]]:
    """The environment and the records; a line that was cut off is left out."""
    first, *lines = path.read_text().splitlines()
    records = []
    for line in lines:
        try:
            records.append(DeviceRecord(**json.loads(line)))
        except ValueError:
            continue
    return json.loads(first), records


def explain(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


class Recorder:
    """One stage's records, added to those of the stages before. What is there already is not measured again."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._path, self._begun = folder / NAME, folder / _BEGUN
        self._known = {record.key() for record in read(self._path)[1]}
        self._end = time.monotonic() + seconds
        self._cut_off = False
        self._deadly = {r.key()[:2] + r.key()[3:4] for r in read(self._path)[1] if r.failure == _ENDED}
        if self._begun.exists():  # by a process before this one
            stage, case, work, name, inputs = json.loads(self._begun.read_text())
            self.add(DeviceRecord(stage, case, work, name, inputs, failure=_ENDED))
            self._deadly.add((stage, case, name))

    def over(self) -> bool:
        """Whether the stage's time is; noted once."""
        over = time.monotonic() > self._end
        if over and not self._cut_off:
            self._cut_off = True
            print("out of time: the rest of this stage is not measured", flush=True)
        return over

    def knows(self, *key: str) -> bool:
        return key in self._known

    def add(self, record: DeviceRecord) -> DeviceRecord:
        self._known.add(record.key())
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
        self._begun.unlink(missing_ok=True)
        return record

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
        """Of what `make` gives: a call, and what to note beside its times. A failure is a record too."""
        key = (stage, case, work, implementation, inputs)
        if self.knows(*key) or self.over() or (stage, case, implementation) in self._deadly:
            return
        self._begun.write_text(json.dumps(key))
        faulthandler.dump_traceback_later(_LONGEST, exit=True)
        try:
            call, figures = make()
            timing = measure(call)
            if timing.host is not None:
                figures = {**figures, "host_ms": timing.host}
            self.add(DeviceRecord(*key, timing.median, timing.low, timing.high, figures=figures, facts=facts or {}))
        except Exception as error:  # a peer that fails here must not end the run
            self.add(DeviceRecord(*key, facts=facts or {}, failure=explain(error)))
            _end_if_device_is_lost()
        finally:
            faulthandler.cancel_dump_traceback_later()


def _end_if_device_is_lost() -> None:
    """After an illegal access nothing works in this process any more: the next one goes on where it ended."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except RuntimeError:
        sys.exit(DEVICE_LOST)
