"""Tables in Markdown from the records under bench/results, and figures under docs/figures.

A goal without a record is reported as "not yet measured".
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report(NamedTuple):
    """What is made of the lines of a file, or of the records that they are read as."""

    table: Callable[[Any], str]
    draw: Callable[[Any, Path], object] = lambda records, folder: None
    read: Callable[..., Any] = dict


def _figure(name: str, make: Callable[[Any], Figure]) -> Callable[[Any, Path], Path]:
    return lambda records, folder: save_both(functools.partial(make, records), folder / f"{name}.png")


def _attention_table(records: list[CpuRecord]) -> str:
    return f"{table(records)}\n\n{goals_table(attention.cpu_goals(records))}"


def _trainings(scale: Scale) -> Report:
    return Report(
        lambda results: f"{len(results)} results.\n\n{training_tables(results, scale)}",
        functools.partial(draw_trainings, scale=scale),
        Result,
    )


REPORTS = {
    attention.RECORDS: Report(_attention_table, _figure("cpu_attention", attention_figures.cpu_figure), CpuRecord),
    batching.RECORDS: Report(lines_table),
    batching.FIGURE_RECORDS: Report(batching.padding_table, _figure("padding", batching.histograms_figure)),
    batching.FILES_RECORDS: Report(batching.files_table),
    batching.TEXT_FILES_RECORDS: Report(batching.text_files_table),
    "cpu_demo": Report(lines_table),
    many_devices.RECORDS: Report(many_devices.tables, _figure("exchanged_bytes", many_devices.figure)),
    moments.RECORDS: Report(moments.share_table, read=CpuRecord),
    resizing.RECORDS: Report(table, _figure("cpu_resize_batch", resizing.cpu_figure), CpuRecord),
    ramp.RECORDS: Report(ramp.ramp_table, _figure("ramp_steps", ramp.ramp_figure)),
    STABILITY: Report(
        lambda lines: f"{len(lines)} runs.\n\n{stability_tables.report(lines)}", stability_figures.draw_all
    ),
    batching.LARGE_RECORDS: Report(batching.large_corpus_table),
    batching.READERS_RECORDS: Report(lines_table),
    shown.DEMO: Report(shown.demo_table, _figure("demo_validation_loss", shown.demo_figure)),
    shown.TUNING: Report(shown.tuning_table, _figure("tuning", shown.tuning_figure)),
}
#: Names with a file for each kind of CPU.
OF_CPUS = (attention.CALLS, attention.SHORT, attention.SEGMENTS, attention.DECODING, resizing.CALLS, resizing.PACKED)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder with records")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures")


def main(arguments: argparse.Namespace) -> None:
    for path in sorted(arguments.records.glob("*.jsonl")):
        if not path.stem.startswith("device"):
            environment, lines = read(path)
            report = _report_of(path)
            records = [report.read(**line) for line in lines]
            report.draw(records, arguments.figures)
            print(f"## {path.stem}\n\n{_facts(environment)}\n\n{report.table(records)}\n")
    print(f"## On a GPU\n\n{_device_report(arguments.records, arguments.figures)}")


def _report_of(path: Path) -> Report:
    if path.stem.startswith(OF_CPUS):
        return Report(table, read=CpuRecord)
    if path.stem.endswith("_training"):  # a file for each device
        return _trainings(TOY if path.stem.startswith("cpu") else H200)
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
