"""Tables in Markdown from the records under bench/results, and figures under docs/figures.

A goal without a record is reported as "not yet measured".
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.figures import draw_all as draw_trainings
from experiments.results import Result
from experiments.scales import H200, TOY, Scale
from experiments.stability import figures as stability_figures
from experiments.stability import tables as stability_tables
from experiments.stability.command import RECORDS as STABILITY
from experiments.tables import report as training_tables

from . import ramp, shown
from .alibi_attention import figures as attention_figures
from .alibi_attention import report as attention
from .batching import report as batching
from .common.figures import save_both
from .common.goals import goals_table
from .common.records import FIGURES, RESULTS, CpuRecord, lines_table, read, table
from .gpu.records import read_folder
from .gpu.report import device_report
from .moment_statistics import cpu as moments
from .parallel import report as many_devices
from .resize_batch import report as resizing

Report = Callable[[list[dict[str, Any]], Path], str]


def _of_lines(table: Callable[[list[dict[str, Any]]], str]) -> Report:
    """The table, without a figure."""
    return lambda lines, figures: table(lines)


def _of_records(table: Callable[[list[CpuRecord]], str]) -> Report:
    return lambda lines, figures: table([CpuRecord(**line) for line in lines])


def _attention_report(lines: list[dict[str, Any]], figures: Path) -> str:
    records = [CpuRecord(**line) for line in lines]
    save_both(functools.partial(attention_figures.cpu_figure, records), figures / "cpu_attention.png")
    return f"{table(records)}\n\n{goals_table(attention.cpu_goals(records))}"


def _resize_report(lines: list[dict[str, Any]], figures: Path) -> str:
    records = [CpuRecord(**line) for line in lines]
    save_both(functools.partial(resizing.cpu_figure, records), figures / "cpu_resize_batch.png")
    return table(records)


def _training_report(lines: list[dict[str, Any]], figures: Path, scale: Scale) -> str:
    results = [Result(**line) for line in lines]
    draw_trainings(results, figures, scale)
    return f"{len(lines)} results.\n\n{training_tables(results, scale)}"


def _stability_report(lines: list[dict[str, Any]], figures: Path) -> str:
    stability_figures.draw_all(lines, figures)
    return f"{len(lines)} runs.\n\n{stability_tables.report(lines)}"


#: For each records file: a function of its records and of the folder for figures, which returns Markdown.
REPORTS: dict[str, Report] = {
    attention.RECORDS: _attention_report,
    batching.RECORDS: _of_lines(lines_table),
    batching.FIGURE_RECORDS: batching.figure_report,
    batching.FILES_RECORDS: _of_lines(batching.files_table),
    batching.TEXT_FILES_RECORDS: _of_lines(batching.text_files_table),
    "cpu_demo": _of_lines(lines_table),
    many_devices.RECORDS: many_devices.report,
    moments.RECORDS: _of_records(moments.share_table),
    resizing.RECORDS: _resize_report,
    ramp.RECORDS: ramp.report,
    STABILITY: _stability_report,
    batching.LARGE_RECORDS: _of_lines(batching.large_corpus_table),
    batching.READERS_RECORDS: _of_lines(lines_table),
    shown.DEMO: shown.demo_report,
    shown.TUNING: shown.tuning_report,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder with records")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures")


def main(arguments: argparse.Namespace) -> None:
    for path in sorted(arguments.records.glob("*.jsonl")):
        if not path.stem.startswith("device"):
            environment, lines = read(path)
            text = _report_of(path)(lines, arguments.figures)
            print(f"## {path.stem}\n\n{_facts(environment)}\n\n{text}\n")
    print(f"## On a GPU\n\n{_device_report(arguments.records, arguments.figures)}")


def _report_of(path: Path) -> Report:
    if path.stem.endswith("_training"):  # a file for each device
        return functools.partial(_training_report, scale=TOY if path.stem.startswith("cpu") else H200)
    by_cpu = (attention.CALLS, attention.SHORT, attention.SEGMENTS, attention.DECODING, resizing.CALLS, resizing.PACKED)
    if path.stem.startswith(by_cpu):  # a file for each kind of CPU
        return _of_records(table)
    if path.stem not in REPORTS:
        sys.exit(f"{path} has no report; files with a report: {', '.join(REPORTS)}, device*, *_training")
    return REPORTS[path.stem]


def _facts(environment: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in environment.items() if value)


def _device_report(folder: Path, figures: Path) -> str:
    environments, records = read_folder(folder)
    texts = [f"{name}: {_facts(environment)}" for name, environment in environments.items()]
    if not environments:
        texts = ["Not yet measured: `python -m bench device` writes the records."]
    attention_figures.draw_device(records, figures)
    return "\n\n".join([*texts, device_report(records)])
