"""Histograms of a corpus's lengths and of its batches by each setting, with the table, as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..planning.plan import IntArray
from .comparison import Batching

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: Of Okabe and Ito, told apart with any colour vision.
_COLOURS = ("#999999", "#E69F00", "#56B4E9", "#0072B2", "#D55E00")


def draw(lengths: IntArray, batchings: list[Batching], counted: str, path: Path) -> None:
    """
    Args:
        lengths: (items,) int64, tokens.
        batchings: what to compare.
        counted: what a token is, in words.
        path: a PNG.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), dpi=130, layout="constrained")
    panels = figure.subplot_mosaic(
        [["lengths", "padding", "tokens"], ["table", "table", "table"]], height_ratios=(5, 2)
    )
    _draw_lengths(panels["lengths"], lengths, counted)
    shares = [(each.padded_tokens - each.tokens) / np.maximum(each.padded_tokens, 1) for each in batchings]
    _draw_batches(panels["padding"], batchings, shares, np.linspace(0, 1, 41), "padding of a batch")
    tokens = [each.padded_tokens for each in batchings]
    smallest, largest = (int(np.quantile(np.concatenate(tokens), share)) for share in (0.005, 0.995))
    edges = np.geomspace(max(1, smallest), 1.1 * largest + 1, 41)
    _draw_batches(panels["tokens"], batchings, tokens, edges, "tokens of a batch, with padding")
    panels["tokens"].set_xscale("log")
    panels["padding"].xaxis.set_major_formatter("{x:.0%}")
    figure.legend(*panels["tokens"].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    _draw_table(panels["table"], batchings)
    figure.savefig(path)


def _draw_lengths(axes: Axes, lengths: IntArray, counted: str) -> None:
    edges = np.unique(np.geomspace(1, max(2, int(lengths.max()) + 1), 50).astype(int))
    axes.hist(np.maximum(lengths, 1), bins=edges.tolist(), color="0.4")
    axes.set(xscale="log", xlabel="tokens of an item", ylabel="items")
    axes.set_title(f"{len(lengths):,} items, {int(lengths.sum()):,} tokens\n{counted}", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_batches(
    axes: Axes, batchings: list[Batching], values: Sequence[np.ndarray], edges: np.ndarray, what: str
) -> None:
    """Shares of all batches, since their numbers differ."""
    for batching, colour, found in zip(batchings, _COLOURS, values, strict=True):
        counts, _ = np.histogram(np.clip(found, edges[0], edges[-1]), edges)
        axes.stairs(counts / counts.sum(), edges, color=colour, linewidth=1.5, label=batching.name)
    axes.set(xlabel=what, ylabel="share of the batches")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_table(axes: Axes, batchings: list[Batching]) -> None:
    rows = [
        [each.name, f"{len(each.rows):,}", f"{each.tokens.mean():,.0f}", f"{each.padding:.1%}", _used(each)]
        for each in batchings
    ]
    columns = ["", "batches", "tokens of a batch", "padding", "budget used"]
    drawn = axes.table(
        rows, colLabels=columns, loc="center", edges="horizontal", colWidths=[0.44, 0.1, 0.15, 0.1, 0.12]
    )
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    axes.set_axis_off()


def _used(batching: Batching) -> str:
    return "" if batching.budget_used is None else f"{batching.budget_used:.1%}"
