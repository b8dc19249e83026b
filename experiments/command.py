"""Does sequence-length warmup train better? The experiments of docs/benchmarks/experiments.md, from text to figures.

Every run is examples/train_gpt2/train.py in its own process. To continue, call the command again: finished runs are
read, and a stopped run resumes from its last checkpoint. (a) and (d) are timed: run them on a quiet machine.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from bench.common.records import FIGURES, RESULTS
from seqwarm_kernels.demo.text import standard_library

from . import publishing
from .experiments import Experiments
from .figures import draw_all
from .plan import EXPERIMENTS, SWEEP
from .running import OtherRun, OutOfTime, RunFailed, Runner, environment_of_runs
from .scales import SCALES, Scale
from .stability import command as stability
from .tables import report

UNSTABLE = "stability"  #: the experiment of experiments/stability, which has runs and records of its own


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=SCALES, default="toy")
    parser.add_argument("--text", type=Path, nargs="+", help="files and folders; default: Python's standard library")
    parser.add_argument("--out", type=Path, required=True, help="folder for all runs, records and figures")
    letters = [letter for letter in EXPERIMENTS if letter != SWEEP]
    meanings = "; ".join(f"{letter}: {EXPERIMENTS[letter]}" for letter in letters)
    only_help = f"{meanings}; {UNSTABLE}: warmup where the baseline is unstable (default: all letters)"
    parser.add_argument("--only", nargs="+", choices=[*letters, UNSTABLE], default=letters, help=only_help)
    parser.add_argument("--seeds", type=int, default=3, help="seeds of the baseline and the best duration, and of (c)")
    parser.add_argument("--minutes", type=float, help="stop after this time; the next call continues")
    parser.add_argument(
        "--publish", action="store_true", help="also write records and figures to bench/results and docs/figures"
    )
    stability.add_arguments(parser)


def main(arguments: argparse.Namespace) -> None:
    letters = [experiment for experiment in arguments.only if experiment != UNSTABLE]
    if UNSTABLE in arguments.only:
        stability.main(arguments, FIGURES)
    if letters:
        _main(arguments, letters)


def _main(arguments: argparse.Namespace, letters: list[str]) -> None:
    scale, out = SCALES[arguments.scale], arguments.out.resolve()
    if arguments.seeds < 1:
        sys.exit(f"--seeds must be at least 1, got {arguments.seeds}")
    if scale.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"--scale {scale.name} needs a CUDA device, which this machine does not have")
    out.mkdir(parents=True, exist_ok=True)
    text = [path.resolve() for path in arguments.text] if arguments.text else [standard_library_folder(out)]
    experiments = Experiments(Runner(scale, text, out, arguments.minutes), arguments.seeds)
    try:
        failure = _train(experiments, letters)
        results, environment = experiments.all_results(), _merged(experiments.environments())
    except OtherRun as error:
        sys.exit(str(error))
    name, lines = records_name(scale), [asdict(result) for result in results]
    publishing.write(out / name, environment, lines)
    print(report(results, scale))
    publishing.draw(draw_all, results, out / "figures", scale)
    if arguments.publish:
        failure = failure or publishing.refusal(RESULTS / name, lines, ("experiment", "case"))
    if arguments.publish and failure is None:
        publishing.write(RESULTS / name, environment, lines)
        publishing.draw(draw_all, results, FIGURES, scale)
    if failure is not None:
        sys.exit(failure)


def _train(experiments: Experiments, only: list[str]) -> str | None:
    try:
        experiments.train(only)
    except OutOfTime as over:
        print(f"{over}: call the same command again to continue")
    except RunFailed as error:
        return str(error)
    return None


def standard_library_folder(out: Path) -> Path:
    """A copy of Python's standard library, as the demo reads it, in a folder below `out`. Each file is a document."""
    folder = out / "standard_library"
    for file in standard_library():
        path = folder / file.name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.content)
    return folder


def _merged(environments: list[dict[str, Any]]) -> dict[str, Any]:
    """The environment of all machines that trained, with every value that differs. Default: this machine's."""
    found = environments or [environment_of_runs()]
    names = {name: None for each in found for name in each}
    values = {name: list(dict.fromkeys(each.get(name) for each in found)) for name in names}
    return {name: kept[0] if len(kept) == 1 else "; ".join(map(str, kept)) for name, kept in values.items()}


def records_name(scale: Scale) -> str:
    if scale.device == "cpu":
        return "cpu_training.jsonl"
    slug = re.sub(r"[^a-z0-9]+", "_", torch.cuda.get_device_name().lower()).strip("_")
    return f"{slug}_training.jsonl"
