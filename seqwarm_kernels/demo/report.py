"""The report: one figure, and one page in Markdown."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import torch

from ..utils.figures import write_figure
from ..utils.report_page import how_it_was_made, image, table, write_page
from ..utils.run_folder import RunFolder
from .figure import LABELS, progress_figure
from .records import WARMUP, Comparison, Crossing, Record, full_length_speed
from .settings import Settings
from .text import Corpus
from .training import METRICS, make_scheduler

PAGE, FIGURE = "report.md", "report.png"


def write_report(
    folder: RunFolder, settings: Settings, corpus: Corpus, comparison: Comparison, command_line: str
) -> None:
    lengths = [(float(tokens), length) for tokens, length in make_scheduler(WARMUP, settings).milestones()]
    figure = folder.path / FIGURE
    write_figure(lambda: progress_figure(comparison, lengths, settings.seed), figure)
    made_by = {"text": corpus.describe(), **asdict(settings), "device": _device_name(settings)}
    parts = [
        f"**{comparison.headline()}**",
        comparison.speed_warning() or "",
        image("Validation loss and sequence length against tokens", figure),
        result_table(comparison),
        f"## How to read it\n\n{_explanation(settings)}",
        f"## How it was made\n\n{how_it_was_made(command_line, made_by)}",
        f"Every evaluation is a line of [{METRICS}]({METRICS}).",
    ]
    write_page(folder.path / PAGE, "Sequence-length warmup: demo", parts)


def report_text(folder: RunFolder, comparison: Comparison) -> str:
    """The text to print."""
    sentences = [comparison.headline(), comparison.speed_warning(), f"Report: {folder.path / PAGE}"]
    return "\n".join(["", result_table(comparison), "", *filter(None, sentences)])


def result_as_json(folder: RunFolder, settings: Settings, comparison: Comparison) -> dict[str, Any]:
    """Plain values: settings, crossings of the baseline's final loss, and all evaluations."""
    crossing = comparison.warmup_crossing
    return {
        "report": str(folder.path),
        "headline": comparison.headline(),
        "warning": comparison.speed_warning(),
        "target_loss": comparison.target,
        "baseline_reached": asdict(comparison.baseline_crossing),
        "warmup_reached": None if crossing is None else asdict(crossing),
        "settings": asdict(settings),
        "records": [asdict(record) for record in comparison.baseline + comparison.warmup],
    }


def result_table(comparison: Comparison) -> str:
    reached = f"reached {comparison.target:.4f} after"
    head = ["run", "final validation loss", "steps", "tokens", "seconds", "tokens/s at full length", reached]
    runs = (comparison.baseline, comparison.baseline_crossing), (comparison.warmup, comparison.warmup_crossing)
    return table(head, [_result_row(records, crossing) for records, crossing in runs])


def _result_row(records: list[Record], crossing: Crossing | None) -> list[str]:
    last, speed = records[-1], full_length_speed(records)
    reached = "not" if crossing is None else f"{crossing.seconds:.1f} s, {crossing.tokens / 1e6:.2f} M tokens"
    numbers = [f"{last.validation_loss:.4f}", f"{last.step:,}", f"{last.tokens:,}", f"{last.seconds:.1f}"]
    return [LABELS[last.run], *numbers, "-" if speed is None else f"{speed:,.0f}", reached]


def _explanation(settings: Settings) -> str:
    return f"""\
- Both runs start from the same weights and train on {settings.total_tokens:,} tokens (bytes) of the same windows. One
  trains at length {settings.seq_length} throughout, the other starts at length {settings.min_seq_length} and grows over
  the first {settings.length_warmup:.0%} of the tokens, in more and smaller steps.
- At equal tokens, both runs have the same learning rate.
- "Reached" is the first crossing of the baseline's final loss, linearly interpolated between evaluations.
- Seconds are those of training only. "Tokens/s at full length" should be about equal: both runs do the same work there.
- One seed is one sample. `--seed 1` gives another."""


def _device_name(settings: Settings) -> str:
    if settings.device == "cpu":
        return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(settings.device) if settings.device.startswith("cuda") else settings.device
