"""docs/figures/stability_*.png, drawn from the records."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.common.figures import look_of, mark, plot, save_both
from seqwarm_kernels.utils.figures import PLAIN_NUMBERS, new_figure

from . import outcomes
from .arms import BEST, FIRST
from .definitions import TRAINS
from .outcomes import Run
from .running import Record
from .tables import best_baseline, compared

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST_LOSS = 4.0  #: of the axis; runs begin above 5

#: The arms in the figures, and the name of each one's look.
SHOWN = {
    FIRST: "full length throughout",
    BEST: "sequence-length warmup",
    "warmup 0.3, 6 steps": "the same, rate warmed up in 6 steps",
    "batch warmup 0.3": "batch-size warmup",
    "learning-rate warmup 0.3": "longer learning-rate warmup",
    "clipped to 1": "clipped gradients",
}


def draw_all(records: Sequence[Record], folder: Path) -> list[Path]:
    """Draw both figures, if there are runs of the arms. Returns their paths."""
    runs = compared(records)
    if not runs:
        return []
    best = best_baseline(records)
    rates = save_both(functools.partial(rates_figure, runs, best), folder / "stability_rates.png")
    return [rates, save_both(functools.partial(runs_figure, runs), folder / "stability_runs.png")]


def rates_figure(runs: Sequence[Run], best: float | None) -> Figure:
    """A column for each rate. Left: the share of seeds that train. Right: the final loss of each seed."""
    figure = new_figure(12, 4.8)
    shares, losses = figure.subplots(1, 2)
    rates = outcomes.rates_of(runs)
    names = [arm for arm in SHOWN if any(run.arm == arm for run in runs)]
    for place, arm in enumerate(names):
        shift = 0.8 * ((place + 0.5) / len(names) - 0.5)  # beside the others in the column of the rate
        own = {column + shift: outcomes.of(runs, arm, rate) for column, rate in enumerate(rates)}
        _draw_shares(shares, SHOWN[arm], {x: found for x, found in own.items() if found})
        points = [(x, run.figures["final_loss"]) for x, found in own.items() for run in found]
        known = [point for point in points if point[1] is not None]
        plot(losses, SHOWN[arm], *zip(*known, strict=True), linestyle="none", markersize=6, alpha=0.8)
    for axes in (shares, losses):
        axes.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
        axes.set_xticks([column + 0.5 for column in range(len(rates) - 1)], minor=True)
        axes.grid(visible=False, which="major", axis="x")
        axes.grid(which="minor", axis="x")  # between the columns
        axes.tick_params(axis="x", which="both", length=0)
        axes.set(xlabel="peak of the learning rate", xlim=(-0.5, len(rates) - 0.5))
    shares.set(ylim=(-0.03, 1.03), ylabel="share of seeds that train")
    shares.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    shares.set_title("Seeds that train, with 95 % intervals")
    losses.set_ylabel("final validation loss (nats per byte)")
    losses.set_title("Final loss, each seed")
    if best is not None:
        mark(losses, "trains below", y=TRAINS * best, at=0.01)
    handles = {str(line.get_gid()): line for line in losses.lines if line.get_gid()}
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=3)
    return figure


def _draw_shares(axes: Axes, name: str, runs_by_place: dict[float, list[Run]]) -> None:
    found = {x: outcomes.share_of(runs, lambda run: run.trains) for x, runs in runs_by_place.items()}
    known = {x: interval for x, interval in found.items() if interval is not None}
    plot(axes, name, list(known), [interval.value for interval in known.values()], linestyle="none", markersize=6)
    lows, highs = [interval.low for interval in known.values()], [interval.high for interval in known.values()]
    axes.vlines(list(known), lows, highs, color=look_of(name)["color"], linewidth=1.5, alpha=0.5)


def runs_figure(runs: Sequence[Run]) -> Figure:
    """Training loss of every seed, at the rate that differs most: baseline and warmup, and two that cost nothing."""
    rate = telling_rate(runs)
    figure = new_figure(12, 4.8)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, arms in zip(panels, ((FIRST, BEST), ("learning-rate warmup 0.3", "clipped to 1")), strict=True):
        for arm in arms:
            for run in outcomes.of(runs, arm, rate):
                curve = [(tokens / 1000, low) for tokens, low, _ in run.figures["curve"] if low is not None]
                plot(axes, SHOWN[arm], *zip(*curve, strict=True), marker="none", alpha=0.75, linewidth=1.3)
        axes.set_xlabel("tokens trained on, in thousands")
        axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
    panels[0].set(ylabel="training loss (nats per byte)", ylim=(None, LARGEST_LOSS))
    panels[0].set_title("Smallest training loss of a few steps, each seed")
    panels[1].set_title("The baseline with a longer learning-rate warmup, or clipped")
    handles = {str(line.get_gid()): line for axes in panels for line in axes.lines if line.get_gid()}
    title = f"peak of the learning rate {rate:g}"
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=2, title=title)
    return figure


def telling_rate(runs: Sequence[Run]) -> float:
    """The rate at which most seeds differ between baseline and warmup; the largest of several."""
    return max(
        outcomes.rates_of(runs), key=lambda rate: (sum(outcomes.gained_and_lost(runs, BEST, FIRST, rate)[:2]), rate)
    )
