"""The figures of the report, as PNG files in memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import TYPE_CHECKING

from .records import BASELINE, WARMUP, Comparison, Crossing, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Blue and orange of Okabe and Ito, distinct for any color vision. The markers differ, too.
COLORS = {BASELINE: "#0072B2", WARMUP: "#D55E00"}
MARKERS = {BASELINE: "o", WARMUP: "s"}
LABELS = {BASELINE: "full length throughout", WARMUP: "sequence-length warmup"}

#: The losses of interest are at the end. The first steps would squeeze them into the last tenth of the axis.
FIRST_SHOWN_SHARE = 0.1


def loss_figure(comparison: Comparison) -> bytes:
    """Draws the validation loss at the full length against seconds and against tokens."""
    figure = _figure(width=10)
    by_seconds, by_tokens = figure.subplots(1, 2, sharey=True)
    _draw_losses(by_seconds, comparison, lambda point: point.seconds, "s")
    _draw_losses(by_tokens, comparison, lambda point: point.tokens / 1e6, "M")
    by_seconds.set_xlabel("seconds of training")
    by_tokens.set_xlabel("million tokens")
    by_seconds.set_ylabel("validation loss at full length (nats/byte)")
    by_seconds.legend(frameon=False)
    return _png(figure)


def _draw_losses(axes: Axes, comparison: Comparison, x: Callable[[Record | Crossing], float], unit: str) -> None:
    for records in (comparison.baseline, comparison.warmup):
        run = records[0].run
        axes.plot(
            [x(record) for record in records],
            [record.validation_loss for record in records],
            color=COLORS[run],
            marker=MARKERS[run],
            markersize=4,
            label=LABELS[run],
        )
    axes.axhline(comparison.target, color="0.4", linestyle="--", linewidth=1, label="the baseline's final loss")
    _mark_crossing(axes, comparison, x, unit)
    tail = [
        record.validation_loss
        for record in comparison.baseline + comparison.warmup
        if record.tokens >= FIRST_SHOWN_SHARE * comparison.baseline[-1].tokens
    ]
    margin = 0.06 * (max(tail) - min(tail) or 1)
    axes.set_ylim(min(tail) - margin, max(tail) + margin)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.25)


def _mark_crossing(axes: Axes, comparison: Comparison, x: Callable[[Record | Crossing], float], unit: str) -> None:
    crossing = comparison.warmup_crossing
    if crossing is None:
        return
    axes.plot(x(crossing), comparison.target, "*", color="black", markersize=13, zorder=3, label="reached here")
    axes.annotate(
        f"{x(crossing):.3g} {unit}",
        (x(crossing), comparison.target),
        xytext=(-6, -16),  # both curves fall, so the space below and to the left is empty
        horizontalalignment="right",
        textcoords="offset points",
        fontweight="bold",
    )


def length_figure(comparison: Comparison, lengths: list[tuple[float, int]]) -> bytes:
    """Draws the sequence length and the optimizer steps of both runs against tokens.

    Args:
        comparison: both runs.
        lengths: the warmup run's schedule, as (tokens, length).
    """
    figure = _figure(width=10)
    by_tokens, steps = figure.subplots(1, 2)
    end = comparison.baseline[-1]
    warmup = [*lengths, (end.tokens, lengths[-1][1])]
    for run, points in ((BASELINE, [(0, warmup[-1][1]), warmup[-1]]), (WARMUP, warmup)):
        by_tokens.step(
            [tokens / 1e6 for tokens, _ in points],
            [length for _, length in points],
            where="post",
            color=COLORS[run],
            label=LABELS[run],
        )
    for records in (comparison.baseline, comparison.warmup):
        run = records[0].run
        steps.plot(
            [record.tokens / 1e6 for record in records],
            [record.step for record in records],
            color=COLORS[run],
            marker=MARKERS[run],
            markersize=4,
            label=LABELS[run],
        )
    by_tokens.set_ylabel("sequence length (tokens)")
    steps.set_ylabel("optimizer steps so far")
    for axes in (by_tokens, steps):
        axes.set_xlabel("million tokens")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.25)
    by_tokens.legend(frameon=False, loc="lower right")
    return _png(figure)


def _figure(width: float) -> Figure:
    from matplotlib.figure import Figure  # without pyplot, so that it needs no display

    return Figure(figsize=(width, 4), dpi=150, layout="constrained")


def _png(figure: Figure) -> bytes:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()
