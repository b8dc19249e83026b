"""The report: two figures, an interactive page, and a summary in Markdown."""

from __future__ import annotations

import platform
from dataclasses import asdict
from typing import Any

import torch

from ..utils.figures import png
from ..utils.report_page import versions
from . import page
from .figures import length_figure, loss_figure
from .records import WARMUP, Comparison, Crossing, Record, full_length_speed
from .report_folder import METRICS, SUMMARY, ReportFolder
from .settings import Settings
from .text import Corpus
from .training import make_scheduler

LOSS_FIGURE = "validation_loss.png"
LENGTH_FIGURE = "sequence_length.png"
PAGE = "report.html"


def write_report(folder: ReportFolder, settings: Settings, corpus: Corpus, comparison: Comparison) -> None:
    """Writes the figures, the page, and the summary last, since it marks the run as finished."""
    lengths = [(float(tokens), length) for tokens, length in make_scheduler(WARMUP, settings).milestones()]
    folder.write(LOSS_FIGURE, png(lambda: loss_figure(comparison, settings.seed)))
    folder.write(LENGTH_FIGURE, png(lambda: length_figure(comparison, lengths)))
    rows = _setting_rows(settings, corpus)
    folder.write(PAGE, page.report(comparison, lengths, _result(comparison), rows, folder.command()))
    folder.write(SUMMARY, summary(settings, corpus, comparison).encode())


def report_text(folder: ReportFolder, comparison: Comparison) -> str:
    """The text to print."""
    files = f"Report: {folder.path / PAGE} and {folder.path / SUMMARY}"
    sentences = [comparison.headline(), comparison.speed_warning(), files]
    return "\n".join(["", _table(*_result(comparison)), "", *filter(None, sentences)])


def result_as_json(folder: ReportFolder, settings: Settings, comparison: Comparison) -> dict[str, Any]:
    """Plain values: settings, crossings of the baseline's final loss, and all evaluations."""
    crossing = comparison.warmup_crossing
    return {
        "report": str(folder.path),
        "headline": comparison.headline(),
        "warning": comparison.speed_warning(),
        "target_loss": comparison.target,
        "baseline_reached": asdict(comparison.baseline_crossing),
        "warmup_reached": None if crossing is None else asdict(crossing),
        "settings": settings.to_json(),
        "records": [asdict(record) for record in comparison.baseline + comparison.warmup],
    }


def summary(settings: Settings, corpus: Corpus, comparison: Comparison) -> str:
    """Returns the page in Markdown."""
    return f"""# Sequence-length warmup: demo

**{comparison.headline()}**
{_warning(comparison)}
![Validation loss against seconds and tokens]({LOSS_FIGURE})

{_table(*_result(comparison))}

![Sequence length and steps against tokens]({LENGTH_FIGURE})

## How to read it

- Both runs start from the same weights, share every setting, and train on {settings.total_tokens:,} tokens
  (bytes) each, drawn from the same windows of the same text. One trains at length {settings.seq_length}
  throughout. The other starts at length {settings.min_seq_length} and grows to {settings.seq_length} over the first
  {settings.length_warmup:.0%} of its tokens, by cutting every batch to the current length.
- Validation loss is always measured at the full length, {settings.seq_length}, on the same held-out windows. The
  held-out text is from other files, or from the end of the only file. The loss is in nats per byte. Lower is better.
- "Reached" is the first crossing of the baseline's final loss, linearly interpolated between evaluations. The same
  rule applies to both runs.
- Seconds are those of training only, without evaluations, checkpoints and one-time costs, which `warmup_allocator`
  takes before each run. They are measured once, one run after the other, on one machine: differences of a few
  per cent mean nothing. "Tokens/s at full length" should be about equal in both runs, which do the same work there.
  If it is not, the machine was busy with something else.
- A step on short sequences has fewer tokens, so the warmup run makes more and smaller steps from the same tokens.
  This is part of the method, and part of its effect on the loss.
- The learning rate follows tokens, not steps. By steps, the many small steps would use up the decay before the
  model has seen its share of the text. At equal tokens, both runs have the same learning rate.
- One seed is one sample. `--seed 1` gives another.

## Settings

{_table(["setting", "value"], [*_setting_rows(settings, corpus), ["versions", versions()]])}

Every evaluation is a line of [{METRICS}]({METRICS}). [{PAGE}]({PAGE}) has the curves to hover over.
"""


def _warning(comparison: Comparison) -> str:
    warning = comparison.speed_warning()
    return f"\n> {warning}\n" if warning else ""


def _result(comparison: Comparison) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of results."""
    rows = [
        _result_row("full length throughout", comparison.baseline, comparison.baseline_crossing),
        _result_row("sequence-length warmup", comparison.warmup, comparison.warmup_crossing),
    ]
    reached = f"reached {comparison.target:.4f} after"
    head = ["run", "final validation loss", "steps", "tokens", "seconds", "tokens/s at full length", reached]
    return head, rows


def _result_row(label: str, records: list[Record], crossing: Crossing | None) -> list[str]:
    last, speed = records[-1], full_length_speed(records)
    reached = "not" if crossing is None else f"{crossing.seconds:.1f} s, {crossing.tokens / 1e6:.2f} M tokens"
    numbers = [f"{last.validation_loss:.4f}", f"{last.step:,}", f"{last.tokens:,}", f"{last.seconds:.1f}"]
    return [label, *numbers, "-" if speed is None else f"{speed:,.0f}", reached]


def _setting_rows(settings: Settings, corpus: Corpus) -> list[list[str]]:
    bytes_read = f"{len(corpus.training):,} bytes for training, {len(corpus.validation):,} for validation"
    return [
        ["text", f"{corpus.source}: {bytes_read}"],
        [
            "model",
            f"GPT with ALiBi: {settings.layers} layers, {settings.heads} heads, width {settings.width}",
        ],
        ["batch", settings.batch],
        [
            "sequence length",
            f"{settings.min_seq_length} to {settings.seq_length} in steps of {settings.length_step_size}, "
            f"over {settings.length_warmup:.0%} of the tokens",
        ],
        [
            "learning rate",
            f"{settings.peak_learning_rate:g}, linear from 0 over {settings.learning_rate_warmup:.0%} of the "
            "tokens, then a cosine to 0",
        ],
        ["optimizer", f"AdamW, weight decay {settings.weight_decay:g}, gradients clipped at norm 1"],
        ["precision", "float32" if settings.autocast_dtype is None else "bfloat16 autocast"],
        ["seed", str(settings.seed)],
        ["device", _device_name(settings)],
    ]


def _device_name(settings: Settings) -> str:
    if settings.device == "cpu":
        return f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name(settings.device)


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
