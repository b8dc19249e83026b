"""Copies a finished demo, or a search of `tune`, to bench/results, so that `python -m bench report` can draw it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqwarm_kernels.demo.records import Comparison, Record
from seqwarm_kernels.demo.report import progress_figure
from seqwarm_kernels.demo.settings import Settings
from seqwarm_kernels.demo.training import METRICS
from seqwarm_kernels.tuning.configuration import SearchConfiguration
from seqwarm_kernels.tuning.figure import search_figure
from seqwarm_kernels.tuning.trial import Trial
from seqwarm_kernels.tuning.tune_schedule import RESULT
from seqwarm_kernels.utils.run_folder import CONFIGURATION

from .common.records import markdown, write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Lines = list[dict[str, Any]]
DEMO, TUNING = "cpu_demo_run", "cpu_tuning"  #: names of the records files


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="of `seqwarm_kernels demo --report` or `tune --folder`")


def main(arguments: argparse.Namespace) -> None:
    folder = arguments.folder
    if (folder / METRICS).exists():
        evaluations = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
        settings = json.loads((folder / CONFIGURATION).read_text())
        path, _ = write(DEMO, [{"settings": settings, "evaluations": evaluations}])
    elif (folder / RESULT).exists():
        result = json.loads((folder / RESULT).read_text())
        path, _ = write(TUNING, [{name: result[name] for name in ("configuration", "schedule", "trials")}])
    else:
        sys.exit(f"{folder} has neither {METRICS} of a demo nor {RESULT} of a search")
    print(path)


# Each file has one line.


def demo_table(lines: Lines) -> str:
    found = _comparison(lines)
    rows = [
        [last.run, f"{last.tokens:,}", f"{last.validation_loss:.4f}"] for last in (found.baseline[-1], found.warmup[-1])
    ]
    return markdown(["run", "tokens", "validation loss"], rows)


def demo_figure(lines: Lines) -> Figure:
    names = {field.name for field in fields(Settings)}  # records have others, such as the hash of the text
    settings = Settings(**{name: value for name, value in lines[0]["settings"].items() if name in names})
    return progress_figure(_comparison(lines), settings)


def _comparison(lines: Lines) -> Comparison:
    return Comparison.of([Record(**evaluation) for evaluation in lines[0]["evaluations"]])


def tuning_table(lines: Lines) -> str:
    _, trials, accepted = _search(lines)
    rows = []
    for trial in trials:
        tokens = f"{trial.duration:,}", f"{trial.cost:,}"
        rows.append([trial.min_seq_length, *tokens, f"{trial.largest_rise:.2f}", trial.verdict(accepted)])
    return markdown(["min length", "duration", "trained to", "largest rise", "verdict"], rows)


def tuning_figure(lines: Lines) -> Figure:
    return search_figure(*_search(lines))


def _search(lines: Lines) -> tuple[SearchConfiguration, list[Trial], Trial | None]:
    [line] = lines
    configuration = SearchConfiguration(**line["configuration"])
    trials = [
        configuration.trial(recorded["min_seq_length"], recorded["duration"]).replayed(recorded["validations"])
        for recorded in line["trials"]
    ]
    schedule = line["schedule"] or {}
    candidate = schedule.get("min_seq_length"), schedule.get("duration")
    return configuration, trials, next((t for t in trials if (t.min_seq_length, t.duration) == candidate), None)
