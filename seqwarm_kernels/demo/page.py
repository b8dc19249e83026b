"""The report as an interactive page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from ..utils import report_page
from ..utils.figures import look_of
from ..utils.report_page import chart, line
from .figures import LABELS, loss_limits
from .records import BASELINE, WARMUP, Comparison, Crossing, Record


def report(
    comparison: Comparison,
    lengths: list[tuple[float, int]],
    result: tuple[list[str], list[list[str]]],
    settings: list[list[str]],
    command_line: str,
) -> bytes:
    """The page of both runs.

    Args:
        comparison: both runs.
        lengths: the warmup run's schedule, as (tokens, length).
        result: head and rows of the table of results.
        settings: rows of the table of settings.
        command_line: the command that started the run.
    """
    return report_page.page(
        "Sequence-length warmup: demo",
        [
            report_page.text(comparison.headline()),
            report_page.text(comparison.speed_warning() or ""),
            report_page.table("Result", *result),
            _losses(comparison, "seconds of training", ",.1f", lambda point: point.seconds),
            _losses(comparison, "tokens", ",.0f", lambda point: point.tokens),
            _schedule(comparison, lengths),
            _speeds(comparison),
            report_page.how_it_was_made(command_line, settings),
        ],
    )


def _losses(comparison: Comparison, unit: str, hover_format: str, x: Callable[[Record | Crossing], float]) -> str:
    traces = [
        _run_line(records, [x(record) for record in records], [record.validation_loss for record in records])
        for records in (comparison.baseline, comparison.warmup)
    ]
    crossing = comparison.warmup_crossing
    if crossing is not None:
        marker = {"symbol": "star", "size": 14, "color": "black"}
        traces.append(
            {
                "type": "scatter",
                "name": "baseline's final loss reached",
                "x": [x(crossing)],
                "y": [comparison.target],
                "mode": "markers",
                "marker": marker,
            }
        )
    return chart(
        f"Validation loss over {unit}",
        traces,
        x={"title": unit, "tickformat": ",", "hoverformat": hover_format, "rangemode": "tozero"},
        y={"title": "nats per byte, at full length", "range": loss_limits(comparison), "hoverformat": ".4f"},
        note="Double-click shows the first evaluations as well, whose loss is far higher.",
    )


def _schedule(comparison: Comparison, lengths: list[tuple[float, int]]) -> str:
    end, full = comparison.baseline[-1].tokens, lengths[-1][1]
    tokens, values = zip(*lengths, (end, full), strict=True)
    return chart(
        "The schedule",
        [
            line(LABELS[BASELINE], [0, end], [full, full], color=look_of(LABELS[BASELINE]).color, steps=True),
            line(LABELS[WARMUP], tokens, values, color=look_of(LABELS[WARMUP]).color, steps=True),
        ],
        x={"title": "tokens", "tickformat": ","},
        y={"title": "sequence length (tokens)", "rangemode": "tozero"},
    )


def _speeds(comparison: Comparison) -> str:
    traces = []
    for records in (comparison.baseline, comparison.warmup):
        steps = [pair for pair in pairwise(records) if pair[1].seconds > pair[0].seconds]
        lengths = [after.seq_length for _, after in steps]
        speeds = [(after.tokens - before.tokens) / (after.seconds - before.seconds) for before, after in steps]
        traces.append({**_run_line(records, lengths, speeds), "mode": "markers", "opacity": 0.7})
    return chart(
        "Tokens per second over sequence length",
        traces,
        x={"title": "sequence length (tokens)", "rangemode": "tozero"},
        y={"title": "tokens per second", "rangemode": "tozero", "tickformat": ",", "hoverformat": ",.0f"},
        note="One point for the training between two evaluations, at the length of its last step.",
    )


def _run_line(records: list[Record], x: Sequence[float], y: Sequence[float]) -> dict[str, Any]:
    run = records[0].run
    return line(
        LABELS[run],
        x,
        y,
        color=look_of(LABELS[run]).color,
        marker={"symbol": "circle" if run == BASELINE else "square"},
    )
