"""The figures of the report, and the figure of README."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..utils.figures import ink, label_lines, mark, new_figure, plain_numbers, plot
from .records import BASELINE, WARMUP, Comparison, Crossing, Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {BASELINE: "full length throughout", WARMUP: "sequence-length warmup"}

#: The losses of interest are at the end. The first steps would squeeze them into the last tenth of the axis.
FIRST_SHOWN_SHARE = 0.1

#: A schedule: the numbers of tokens at which the length changes, and the lengths from there on.
Lengths = Sequence[tuple[float, int]]
Position = Callable[["Record | Crossing"], float]


def loss_figure(comparison: Comparison, seed: int) -> Figure:
    """Validation loss at the full length against seconds and against tokens."""
    figure = new_figure(13, 4.8)
    by_seconds, by_tokens = figure.subplots(1, 2, sharey=True)
    _draw_losses(by_seconds, comparison, _seconds, "s")
    _draw_losses(by_tokens, comparison, _millions, "M")
    by_seconds.set(xlabel="seconds of training", ylabel="validation loss at the full length\n(nats per byte)")
    by_tokens.set_xlabel("million tokens")
    label_lines([by_seconds, by_tokens])
    figure.suptitle(f"Both runs on the same text, seed {seed} (lower is better)")
    return figure


def progress_figure(comparison: Comparison, lengths: Lengths, seed: int) -> Figure:
    """Validation loss at the full length, and below it the length that is trained on, against tokens."""
    figure = new_figure(9, 6.6)
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    _draw_losses(losses, comparison, _millions, "M")
    _draw_lengths(below, comparison, lengths)
    losses.set_ylabel("validation loss at the full length\n(nats per byte)")
    below.set_xlabel("million tokens trained on")
    label_lines([losses, below], bold=LABELS[WARMUP])
    figure.suptitle(f"A small GPT with and without sequence-length warmup, seed {seed} (lower is better)")
    return figure


def length_figure(comparison: Comparison, lengths: Lengths) -> Figure:
    """Sequence length and optimizer steps of both runs against tokens."""
    figure = new_figure(13, 4.4)
    by_tokens, steps = figure.subplots(1, 2)
    _draw_lengths(by_tokens, comparison, lengths)
    for records in (comparison.baseline, comparison.warmup):
        plot(steps, LABELS[records[0].run], [_millions(each) for each in records], [each.step for each in records])
    steps.set(ylabel="optimizer steps so far", ylim=(0, None), xlim=(0, None))
    plain_numbers(steps.yaxis)
    for axes in (by_tokens, steps):
        axes.set_xlabel("million tokens")
    label_lines([by_tokens, steps])
    return figure


def _seconds(point: Record | Crossing) -> float:
    return point.seconds


def _millions(point: Record | Crossing) -> float:
    return point.tokens / 1e6


def _draw_losses(axes: Axes, comparison: Comparison, x: Position, unit: str) -> None:
    for records in (comparison.baseline, comparison.warmup):
        plot(axes, LABELS[records[0].run], [x(each) for each in records], [each.validation_loss for each in records])
    axes.set_ylim(loss_limits(comparison))
    axes.set_xlim(left=0)
    mark(axes, "final loss at the full length", y=comparison.target, at=0.02)
    _mark_crossings(axes, comparison, x, unit)


def loss_limits(comparison: Comparison) -> tuple[float, float]:
    """Limits of the axis of losses, without the first evaluations."""
    tail = [
        record.validation_loss
        for record in comparison.baseline + comparison.warmup
        if record.tokens >= FIRST_SHOWN_SHARE * comparison.baseline[-1].tokens
    ]
    margin = 0.12 * (max(tail) - min(tail) or 1)
    return min(tail) - margin, max(tail) + margin


def _mark_crossings(axes: Axes, comparison: Comparison, x: Position, unit: str) -> None:
    """Where each run reached the baseline's final loss."""
    for crossing, offset, alignment in (
        (comparison.warmup_crossing, (-5, -6), ("right", "top")),  # both curves fall: below and left is empty,
        (comparison.baseline_crossing, (0, 9), ("right", "bottom")),  # and so is above and right
    ):
        if crossing is not None:
            at = x(crossing)
            axes.plot(at, comparison.target, "*", color=ink(), markersize=12, zorder=3, label="_reached")
            axes.annotate(
                f"{at:.3g} {unit}",
                (at, comparison.target),
                offset,
                textcoords="offset points",
                horizontalalignment=alignment[0],
                verticalalignment=alignment[1],
                fontweight="bold",
            )


def _draw_lengths(axes: Axes, comparison: Comparison, lengths: Lengths) -> None:
    end, full = comparison.baseline[-1].tokens, lengths[-1][1]
    warmup = [*lengths, (end, full)]
    for run, points in ((BASELINE, [(0, full), (end, full)]), (WARMUP, warmup)):
        tokens, of_run = zip(*points, strict=True)
        shown = {"marker": "none", "drawstyle": "steps-post"}
        plot(axes, LABELS[run], [count / 1e6 for count in tokens], of_run, **shown)
    axes.set(ylabel="sequence length\n(tokens)", ylim=(0, 1.15 * full), xlim=(0, None))
