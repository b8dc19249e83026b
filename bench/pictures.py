"""Draws the figures that need no records: what heads visit, the allocator's policy, and a planned schedule."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.attention.reach import Reach, ReachSettings, measure_reach
from seqwarm_kernels.cli.reach_figure import head_title, percent, reach_figure, steepest_first
from seqwarm_kernels.cli.schedule_plan import ModelSize, plan_schedule
from seqwarm_kernels.utils.figures import ACCENT, ink, new_figure, page

from .allocator import replay
from .common.figures import LABEL_SIZE, save_both
from .common.records import FIGURES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEADS, LENGTH, LENGTHS = 12, 8192, [2**power for power in range(7, 15)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures")


def main(arguments: argparse.Namespace) -> None:
    folder = arguments.figures
    reaches = [measure_reach(ReachSettings(HEADS, length)) for length in LENGTHS]
    plan = plan_schedule(SequenceLengthScheduler(8, 1024, duration=3000), 10_000, 32, ModelSize(12, 768, 50257))
    print(save_both(functools.partial(reach_figure, reaches[LENGTHS.index(LENGTH)]), folder / "reach.png"))
    print(save_both(functools.partial(share_figure, reaches), folder / "attended_share.png"))
    print(save_both(plan.figure, folder / "plan.png"))
    print(replay.draw(folder))


def share_figure(reaches: Sequence[Reach]) -> Figure:
    """The share of the visible keys that each head visits at each length: a map of heads by lengths."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    first = reaches[0]
    shares = np.array([reach.shares() for reach in reaches]).T[steepest_first(first)]
    table = np.vstack([shares, shares.mean(0, keepdims=True)])
    figure = new_figure(max(1.1 * len(reaches) + 2.2, 6), 0.36 * len(shares) + 1.7)
    axes = figure.subplots()
    colors = LinearSegmentedColormap.from_list("shares", [to_rgba(page()), to_rgba(ACCENT, 0.7)])
    axes.imshow(table, colors, vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(table):
        axes.text(column, row, percent(share), ha="center", va="center", fontsize=LABEL_SIZE)
    axes.axhline(len(shares) - 0.5, color=ink(), linewidth=1)
    axes.grid(visible=False)
    axes.set_xticks(range(len(reaches)), [f"{reach.settings.length:,}" for reach in reaches])
    axes.set_yticks(range(len(table)), [*(head_title(first, head) for head in steepest_first(first)), "all heads"])
    axes.set_xlabel(f"tokens in a sequence\n(random queries and keys of {first.settings.head_dim} components)")
    figure.suptitle("Share of the visible keys that causal attention visits")
    return figure
