"""The figure of the report, which is also that of README."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..utils.figures import FULL_LENGTH, WITH_WARMUP, ink, name_lines, new_figure, plot_run
from .records import BASELINE, WARMUP, Comparison

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABELS = {BASELINE: FULL_LENGTH, WARMUP: WITH_WARMUP}

#: The losses of interest are at the end. The first steps would squeeze them into the last tenth of the axis.
FIRST_SHOWN_SHARE = 0.1

#: A schedule: the numbers of tokens at which the length changes, and the lengths from there on.
Lengths = Sequence[tuple[float, int]]


def progress_figure(comparison: Comparison, lengths: Lengths, seed: int) -> Figure:
    """Validation loss at the full length, and below it the length that is trained on, against tokens."""
    figure = new_figure(9, 6.6)
    losses, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
    for records in (comparison.baseline, comparison.warmup):
        tokens = [each.tokens / 1e6 for each in records]
        plot_run(losses, LABELS[records[0].run], tokens, [each.validation_loss for each in records])
    losses.set_ylim(_loss_limits(comparison))
    losses.set_ylabel("validation loss at the full length\n(nats per byte)")
    losses.axhline(comparison.target, color=ink(), linestyle=":", label="final loss at the full length")
    _mark_crossings(losses, comparison)
    _draw_lengths(below, comparison, lengths)
    below.set_xlabel("million tokens trained on")
    name_lines(figure)
    figure.suptitle(f"A small GPT with and without sequence-length warmup, seed {seed} (lower is better)")
    return figure


def _loss_limits(comparison: Comparison) -> tuple[float, float]:
    """Limits of the axis of losses, without the first evaluations."""
    tail = [
        record.validation_loss
        for record in comparison.baseline + comparison.warmup
        if record.tokens >= FIRST_SHOWN_SHARE * comparison.baseline[-1].tokens
    ]
    margin = 0.12 * (max(tail) - min(tail) or 1)
    return min(tail) - margin, max(tail) + margin


def _mark_crossings(axes: Axes, comparison: Comparison) -> None:
    """Where each run reached the baseline's final loss."""
    for crossing, offset, vertical in (
        (comparison.warmup_crossing, (-5, -6), "top"),  # both curves fall: below and left is empty,
        (comparison.baseline_crossing, (0, 9), "bottom"),  # and so is above and right
    ):
        if crossing is not None:
            at = crossing.tokens / 1e6, comparison.target
            axes.plot(*at, "*", color=ink(), markersize=12, zorder=3, label="_reached")
            look: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": vertical, "fontweight": "bold"}
            axes.annotate(f"{at[0]:.3g} M", at, offset, **look)


def _draw_lengths(axes: Axes, comparison: Comparison, lengths: Lengths) -> None:
    end, full = comparison.baseline[-1].tokens, lengths[-1][1]
    warmup = [*lengths, (end, full)]
    for run, points in ((BASELINE, [(0, full), (end, full)]), (WARMUP, warmup)):
        tokens, of_run = zip(*points, strict=True)
        plot_run(axes, LABELS[run], [count / 1e6 for count in tokens], of_run, marker="none", drawstyle="steps-post")
    axes.set(ylabel="sequence length\n(tokens)", ylim=(0, 1.15 * full), xlim=(0, None))
