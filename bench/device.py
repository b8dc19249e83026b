"""Everything that needs a GPU, in one call: tests, sanitizer, attention beside its peers, resize_batch, the allocator.

Stages are independent: one that fails is noted and the run goes on. A short table comes last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import torch

from . import device_attention, device_memory
from .device_records import Recorder
from .measure import RESULTS
from .summary import summary

ROOT = Path(__file__).parent.parent
Stage = Callable[[Recorder, torch.device, bool], None]
MEASUREMENTS: dict[str, Stage] = {
    "copy": device_memory.copy,
    "host": device_attention.host_time,
    "attention": device_attention.sweep,
    "packed": device_attention.packed,
    "resize_batch": device_memory.resize,
    "allocator": device_memory.ramp,
}
#: In the order that they run; tests and sanitizer are programs of their own.
STAGES = ("tests", "sanitizer", "copy", "host", "packed", "resize_batch", "allocator", "attention")
SANITIZERS = ("memcheck", "racecheck", "initcheck")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=9.0, help="for everything together")
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--out", type=Path, help="folder for records and logs; default bench/results")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU: does the program itself work?")


def _logged(command: list[str], log: Path, seconds: float) -> str:
    """Run a program with its output in `log`; the last line that it printed, or why there is none."""
    with log.open("w") as file:
        try:
            code = subprocess.run(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, timeout=seconds).returncode
        except subprocess.TimeoutExpired:
            return f"stopped after {seconds:.0f} s; see {log.name}"
        except OSError as error:
            return str(error)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"exit {code}: {lines[-1] if lines else 'no output'}"


def _tests(folder: Path, seconds: float, dry_run: bool) -> list[str]:
    chosen = ["-k", "causal and float32", "--maxfail=1"] if dry_run else ["-m", "gpu", "--maxfail=20"]
    command = [sys.executable, "-m", "pytest", "tests/ops/test_attention_kernels.py" if dry_run else "tests", *chosen]
    return [f"tests: {_logged(command, folder / 'gpu_tests.log', seconds)}"]


def _sanitizer(folder: Path, seconds: float, dry_run: bool) -> list[str]:
    tool = shutil.which("compute-sanitizer")
    if tool is None or dry_run:
        return ["sanitizer: not here"]
    lines = []
    for kind in SANITIZERS:
        command = [tool, "--tool", kind, sys.executable, "-m", "bench.sanitize"]
        lines.append(f"{kind}: {_logged(command, folder / f'sanitizer_{kind}.log', seconds / len(SANITIZERS))}")
    return lines


def main(arguments: argparse.Namespace) -> None:
    tiny = arguments.dry_run
    if not tiny and not torch.cuda.is_available():
        sys.exit("no CUDA device here; --dry-run tries the program itself on the CPU")
    device = torch.device("cpu" if tiny else "cuda")
    folder = arguments.out or (Path(tempfile.mkdtemp()) if tiny else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    seconds = arguments.minutes * 60
    recorder = Recorder(folder / "device.jsonl", seconds)
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    lines: list[str] = []
    for stage in [stage for stage in STAGES if stage in arguments.stages]:
        print(f"{stage} ... {recorder.seconds_left():.0f} s left", flush=True)
        if stage == "tests":
            lines += _tests(folder, min(seconds / 3, recorder.seconds_left()), tiny)
        elif stage == "sanitizer":
            lines += _sanitizer(folder, min(seconds / 6, recorder.seconds_left()), tiny)
        else:
            try:
                MEASUREMENTS[stage](recorder, device, tiny)
            except Exception:  # the other stages go on
                traceback.print_exc()
                lines.append(f"{stage}: failed, {traceback.format_exc().splitlines()[-1]}")
    print("\n".join([*lines, *summary(recorder.records), f"records: {recorder.path}"]))
