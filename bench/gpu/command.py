"""Everything that needs a GPU, in one call: tests, sanitizer, attention and its peers, resize_batch, memory, monitor.

Tests, sanitizer and the compilation of the measured kernels run at the same time. After them, each stage of
measurements runs alone, in a process of its own, so that a crash does not affect other stages. A short table follows.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ..common.processes import Program
from ..common.records import RESULTS
from .records import NAME, device_environment, read_device_records
from .summary import summary

ROOT = Path(__file__).parents[2]
PYTHON = [sys.executable, "-m"]
SANITIZERS = ("memcheck", "racecheck", "initcheck")
TOGETHER = ("tests", "sanitizer", "precompile")
#: Stages in the order that they run, with shares of the time. The next stage gets the time that a stage leaves unused.
STAGES = {
    "tests": 30,
    "long": 20,
    "memory": 8,
    "small": 8,
    "diagnostics": 6,
    "segments": 15,
    "lengths": 35,
    "tuned": 12,
}
STAGES |= {stage: 0 for stage in TOGETHER if stage not in STAGES}
_ATTEMPTS = 6  # processes for one stage
_COMPILERS = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=9.0, help="time for all stages together")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--out", type=Path, help="folder for records and logs (default: bench/results)")
    parser.add_argument("--dry-run", action="store_true", help="run the program with tiny sizes on the CPU, to test it")


def main(arguments: argparse.Namespace) -> None:
    tiny = arguments.dry_run
    if not tiny and not torch.cuda.is_available():
        sys.exit("no CUDA device found; --dry-run tests the program on the CPU")
    folder = (arguments.out or (Path(tempfile.mkdtemp()) if tiny else RESULTS)).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("device*.log"):
        old.unlink()
    (folder / NAME).write_text(json.dumps(device_environment()) + "\n")
    lines = list(_run(arguments.stages, folder, arguments.minutes * 60, tiny))
    if tiny:
        lines.append("dry run on a CPU: the figures are meaningless")
    print("\n".join(["", *lines, *summary(read_device_records(folder / NAME)[1]), f"records and logs: {folder}"]))


def _run(chosen: list[str], folder: Path, seconds: float, tiny: bool) -> Iterator[str]:
    start, used = time.monotonic(), 0
    measured = [stage for stage in STAGES if stage in chosen and stage not in TOGETHER]
    together = [stage for stage in TOGETHER if stage in chosen]
    shares = sum(STAGES[stage] for stage in measured) + (STAGES["tests"] if together else 0)
    if together:
        used += STAGES["tests"]
        yield from _run_together(together, folder, start + seconds * used / shares, tiny)
    for stage in measured:
        used += STAGES[stage]
        yield from _stage(stage, folder, start + seconds * used / shares, tiny)


def _run_together(chosen: list[str], folder: Path, end: float, tiny: bool) -> Iterator[str]:
    running = {}
    for name, command, environment in _programs(chosen, tiny):
        running[name] = Program(command, folder / f"device_{name}.log", ROOT, **environment)
    for name, program in running.items():
        _announce(name, end)
        outcome = program.wait_until(end)
        if not name.startswith("precompile"):
            yield f"{name}: {outcome}"


def _programs(chosen: list[str], tiny: bool) -> Iterator[tuple[str, list[str], dict[str, str]]]:
    if "tests" in chosen:
        which = ["-m", "gpu", "--maxfail=20", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
        if tiny:
            which = ["tests/ops/test_attention_kernels.py", "-k", "causal and float32", "--maxfail=1"]
        elif importlib.util.find_spec("xdist"):
            which += ["--numprocesses", "4"]
        yield "tests", [*PYTHON, "pytest", *which], {}
    if "sanitizer" in chosen:
        tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
        sanitize = [*PYTHON, "bench.gpu.sanitize"]
        yield "kernels", sanitize, {}
        for kind in SANITIZERS if not tiny else ():
            options = ["--tool", kind, "--target-processes", "application-only", "--print-limit", "20"]
            # The tool sees torch's memory pool as one block, and would miss accesses outside of a tensor.
            yield kind, [tool or "compute-sanitizer", *options, *sanitize], {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    if "precompile" in chosen:
        shares = 2 if tiny else _COMPILERS
        for share in range(shares):
            command = [*PYTHON, "bench.alibi_attention.precompile", str(share), str(shares)]
            yield f"precompile_{share}", command, {}


def _stage(name: str, folder: Path, end: float, tiny: bool) -> Iterator[str]:
    """Runs a stage in a process. After a crash another process continues with the measurements that have no record."""
    for attempt in range(_ATTEMPTS):
        seconds = end - time.monotonic()
        if seconds < 1:
            yield f"{name}: no time left"
            return
        _announce(name, end)
        command = [*PYTHON, "bench.gpu.stage", name, "--out", str(folder)]
        command += ["--seconds", f"{max(1.0, seconds - 10):.0f}", *(["--dry-run"] if tiny else [])]
        program = Program(command, folder / f"device_{name}.log", ROOT)
        outcome = program.wait_until(end + 15)
        if program.code == 0 or program.code is None:
            break
        yield f"{name}, process {attempt + 1}: {outcome}"


def _announce(name: str, end: float) -> None:
    print(f"{name} ... {end - time.monotonic():.0f} s at most", flush=True)
