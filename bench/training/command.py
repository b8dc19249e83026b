"""Does sequence-length warmup train better? The experiments of docs/training.md, from text to figures.

Every run is examples/train_gpt2.py in a process of its own. Call it again to go on: finished runs are read, one that
was stopped goes on from its last checkpoint. (a) and (d) are timed: run them on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from seqwarm_kernels.files import write_atomically

from ..device_records import device_environment
from ..measure import RESULTS, environment
from ..report import FIGURES
from .experiments import Experiments
from .figures import draw_all
from .plan import EXPERIMENTS, SWEEP
from .results import Result
from .running import OutOfTime, RunFailed, Runner
from .scales import SCALES, Scale
from .tables import report
from .text import standard_library_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=SCALES, default="toy")
    parser.add_argument("--text", type=Path, nargs="+", help="files and folders; default: Python's standard library")
    parser.add_argument("--out", type=Path, required=True, help="folder of all runs, records and figures")
    letters = [letter for letter in EXPERIMENTS if letter != SWEEP]
    wanted = "; ".join(f"{letter}: {EXPERIMENTS[letter]}" for letter in letters)
    parser.add_argument("--only", nargs="+", choices=letters, default=letters, help=f"{wanted} (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="of the baseline and the best duration, and of (c)")
    parser.add_argument("--minutes", type=float, help="stop in time, to go on with the next call")
    parser.add_argument(
        "--publish", action="store_true", help="records and figures into bench/results and docs/figures"
    )


def main(arguments: argparse.Namespace) -> None:
    scale, out = SCALES[arguments.scale], arguments.out.resolve()
    if arguments.seeds < 1:
        sys.exit(f"--seeds must be at least 1, got {arguments.seeds}")
    if scale.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--scale {scale.name} needs a CUDA device, and there is none here")
    out.mkdir(parents=True, exist_ok=True)
    text = [path.resolve() for path in arguments.text] if arguments.text else [standard_library_folder(out)]
    experiments = Experiments(Runner(scale, text, out, arguments.minutes), arguments.seeds)
    failure = None
    try:
        experiments.train(arguments.only)
    except OutOfTime as over:
        print(f"{over}: the same command again goes on")
    except RunFailed as error:
        failure = str(error)
    results = experiments.results()
    name = records_name(scale)
    _write(out / name, results)
    print(report(results, scale))
    draw_all(results, out / "figures", scale)
    if arguments.publish:
        _write(RESULTS / name, results)
        draw_all(results, FIGURES, scale)
    if failure is not None:
        sys.exit(failure)


def records_name(scale: Scale) -> str:
    if scale.device == "cpu":
        return "cpu_training.jsonl"
    slug = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    return f"{slug}_training.jsonl"


def _write(path: Path, results: list[Result]) -> None:
    here = device_environment() if torch.cuda.is_available() else environment()
    lines = [json.dumps(here), *(json.dumps(asdict(result)) for result in results)]
    write_atomically(path, "".join(line + "\n" for line in lines).encode())
