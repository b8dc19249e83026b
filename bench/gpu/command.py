"""Everything that needs a GPU, in parts. With half an hour on a GPU, in this order:

    --part tests --selection, then --part hopper; --part memory; --part training; --part attention

Each part ends by itself in less than nine minutes, and these in less than thirty. It begins with a compiler, a trivial
kernel and the module for this torch, which is built where there is none; where one of these fails, nothing else runs.
Every record is written as it is measured, to device_<part>.jsonl, and what the programs print to device_<part>.log.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..common.processes import run_program
from ..common.records import RESULTS, ROOT
from . import report
from .records import STEPS, append, begin, drop_replaced, read_device_records, read_folder
from .steps import ESSENTIAL, FIRST, NEED_A_GPU, SANITIZERS, step_record


class Part(NamedTuple):
    minutes: float
    stages: dict[str, int]  #: measurements, with shares of the time. The next stage gets the time that one leaves.


PARTS = {
    "tests": Part(8.5, {}),
    "memory": Part(7.75, {"allocator": 330, "resize": 70, "diagnostics": 35}),
    "training": Part(8.75, {"training": 1}),
    "attention": Part(5.0, {"long": 80, "lengths": 80, "paths": 40, "small": 30, "segments": 40}),
    "hopper": Part(2.0, {"hopper": 1}),
}
SELECTION_MINUTES = 4.0
#: Of the gpu tests, those of kernels that changed since a GPU ran them, and what else is short.
SELECTION = (
    "tests/ops/test_attention_hopper.py",
    "tests/ops/test_attention_triton_short.py",
    "tests/ops/test_attention_decoding.py",
    "tests/ops/test_attention_launch.py",
    "tests/ops/test_attention_triton_parts.py",
    "tests/ops/test_resize_batch_launch.py",
    "tests/ops/test_resize_packed.py",
    "tests/ops/test_moment_statistics.py",
    "tests/allocator",
    "tests/diagnostics",
    "tests/ops/test_dropout_offsets.py",
    "tests/ops/test_attention_kernels.py",
)
_COMPARED = ("long", "segments", "lengths")  # stages whose peers take long to compile
_ATTEMPTS = 6  # processes for one stage
_TOGETHER = max(2, (os.cpu_count() or 4) - 1)  # processes
_STEP_SECONDS, _BUILD_SECONDS = 90.0, 240.0  # a process may take
_START_SECONDS = 15.0  # until a process has imported torch; it then writes its own traceback when the time is over
_NO_POOL = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # else each process starts compilers for all cores


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--selection", action="store_true", help="of the tests, those that matter first, in 4 minutes")
    parser.add_argument("--out", type=Path, help="folder for records and logs (default: bench/results)")
    parser.add_argument("--dry-run", action="store_true", help="run the program with tiny sizes on the CPU, to test it")


def main(arguments: argparse.Namespace) -> None:
    tiny = arguments.dry_run
    if not tiny and not torch.cuda.is_available():
        sys.exit("no CUDA device found; --dry-run tests the program on the CPU")
    folder = (arguments.out or (Path(tempfile.mkdtemp()) if tiny else RESULTS)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, arguments.part, tiny, arguments.selection)
    try:
        run.everything()
    finally:
        drop_replaced(run.records)
        print(f"\n{report.device_report(read_folder(folder)[1])}")
        print(f"{'dry run on a CPU: the figures are meaningless; ' if tiny else ''}records and logs: {folder}")


class Run:
    """One call: a part with its file of records, its log and its end."""

    def __init__(self, folder: Path, part: str, tiny: bool, selection: bool) -> None:
        self.part, self.tiny, self.selection = PARTS[part], tiny, selection
        if selection:
            self.part = self.part._replace(minutes=SELECTION_MINUTES)
        self.records, self.log = folder / f"device_{part}.jsonl", folder / f"device_{part}.log"
        self.end = time.monotonic() + 60 * self.part.minutes
        self._writing = threading.Lock()
        begin(self.records)
        self.log.unlink(missing_ok=True)

    def everything(self) -> None:
        self.steps(ESSENTIAL, _BUILD_SECONDS, together=1)
        failed = [record for record in read_device_records(self.records)[1] if record.failure is not None]
        if failed:
            sys.exit("\n".join(f"{record.case} failed, so nothing else runs: {record.failure}" for record in failed))
        stages = self.part.stages
        if not stages:
            self.steps(FIRST, _STEP_SECONDS)
            _at_once(lambda run: run(), [self.tests] if self.selection else [self.sanitizers, self.tests], 2)
        if set(_COMPARED) & stages.keys():
            self.precompile("attention")
        if "hopper" in stages and not self.tiny:
            self.precompile("hopper")
        start, used = time.monotonic(), 0
        for stage, share in stages.items():
            used += share
            self.stage(stage, start + (self.end - start) * used / sum(stages.values()))

    def sanitizers(self) -> None:
        self.steps(SANITIZERS, 60 * self.part.minutes)

    def steps(self, steps: Iterable[str], seconds: float, together: int = _TOGETHER) -> None:
        """Each in a process of its own, several at a time; in a dry run, which cannot crash, all in one."""
        names = [name for name in steps if not (self.tiny and name in NEED_A_GPU)]
        groups = [names] if self.tiny and names else [[name] for name in names]
        _at_once(lambda group: self._steps_in_a_process(group, seconds), groups, together)

    def _steps_in_a_process(self, names: list[str], seconds: float) -> None:
        seconds = max(1.0, min(seconds, self.end - time.monotonic() - _START_SECONDS))
        command = ["bench.gpu.steps", *names, "--out", str(self.records), "--seconds", f"{seconds:.0f}"]
        _, outcome, text = self._finish(names[0], command, time.monotonic() + seconds + _START_SECONDS, **_NO_POOL)
        recorded = {record.case for record in read_device_records(self.records)[1] if record.stage == STEPS}
        for name in names:
            if name not in recorded:
                append(self.records, step_record(name, seconds, outcome, text))

    def tests(self) -> None:
        command = ["pytest", "-p", "bench.gpu.pytest_records", "-p", "no:cacheprovider"]
        command += ["-o", f"faulthandler_timeout={_STEP_SECONDS}"]
        if self.tiny:
            command += ["tests/ops/test_attention_kernels.py", "-k", "native-float32 and small", "--maxfail", "1"]
        else:
            command += SELECTION if self.selection else ()
            command += ["-m", "gpu", "--hypothesis-profile", "gpu", "--continue-on-collection-errors"]
            if importlib.util.find_spec("xdist"):
                command += ["--numprocesses", str(_TOGETHER)]
        start = time.monotonic()
        environment = _NO_POOL | {"SEQWARM_RECORDS": str(self.records)}
        code, outcome, text = self._finish("pytest", command, self.end - 5, **environment)
        append(self.records, step_record("gpu tests", time.monotonic() - start, None if code == 0 else outcome, text))

    def precompile(self, part: str) -> None:
        """Compiles slow kernels in several processes, so that the stages find them in the caches on disk."""
        shares, end = (1, self.end) if self.tiny else (_TOGETHER, time.monotonic() + _STEP_SECONDS)

        def compile_share(share: int) -> None:
            command = ["bench.alibi_attention.precompile", part, str(share), str(shares)]
            self._finish(f"precompile {share}", command, end, **_NO_POOL)

        _at_once(compile_share, range(shares), shares)

    def stage(self, name: str, end: float) -> None:
        """After a crash another process continues with the measurements that have no record."""
        for _ in range(_ATTEMPTS):
            seconds = end - time.monotonic()
            if seconds < 1:
                print(f"{name}: no time left", flush=True)
                return
            command = ["bench.gpu.stage", name, "--out", str(self.records)]
            command += ["--seconds", f"{max(1.0, seconds - 10):.0f}"]
            if not self._finish(name, command, end + 5)[0]:
                return

    def _finish(self, name: str, command: list[str], end: float, **environment: str) -> tuple[int | None, str, str]:
        """Runs a module until `end` at most, and appends its output to the log: exit code, outcome, output."""
        print(f"{name} ... {end - time.monotonic():.0f} s at most", flush=True)
        own_log = self.log.with_suffix(f".{name.replace(' ', '_')}.log")
        if self.tiny and command[0].startswith("bench.gpu."):
            command = [*command, "--dry-run"]
        code, outcome = run_program([sys.executable, "-m", *command], own_log, ROOT, end, **environment)
        text = own_log.read_text(errors="replace")
        own_log.unlink()
        with self._writing, self.log.open("a") as file:
            file.write(f"==== {name}: {outcome}\n{text}\n")
        return code, outcome, text


def _at_once(run: Callable[[Any], object], items: Iterable[Any], together: int) -> None:
    with ThreadPoolExecutor(together) as pool:
        list(pool.map(run, items))
