"""A PNG with histograms of the item lengths and of the batches of each way of batching, and the table."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...utils.checks import check_path
from ..batch_planning.plan import IntArray, as_lengths
from .comparison import COLUMNS, BatchingResult, check_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes

#: By Okabe and Ito, distinguishable with any color vision.
_COLORS = ("#999999", "#E69F00", "#56B4E9", "#0072B2", "#D55E00")
_COLUMN_WIDTHS = (0.42, 0.09, 0.13, 0.13, 0.09, 0.1)


def draw(lengths: IntArray, results: list[BatchingResult], token_kind: str, path: str | Path) -> None:
    """Draw the comparison. Needs matplotlib.

    Args:
        lengths: (items,) int64, number of tokens in each item.
        results: returned by `compare`.
        token_kind: what a token is, for the title.
        path: the PNG to write.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: there are no lengths or no results.
    """
    lengths = as_lengths(lengths)
    check_results(results)
    for name, values in (("lengths", lengths), ("results", results)):
        if len(values) == 0:
            raise ValueError(f"{name} must not be empty")
    if not isinstance(token_kind, str):
        raise TypeError(f"token_kind must be a string, got {type(token_kind).__name__}")
    path = check_path("path", path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.2), dpi=130, layout="constrained")
    panels = figure.subplot_mosaic(
        [["lengths", "padding", "tokens"], ["table", "table", "table"]], height_ratios=(5, 2)
    )
    _draw_lengths(panels["lengths"], lengths, token_kind)
    shares = [(each.padded_tokens - each.tokens) / np.maximum(each.padded_tokens, 1) for each in results]
    _draw_batches(panels["padding"], results, shares, np.linspace(0, 1, 41), "padding of a batch")
    tokens = [each.padded_tokens for each in results]
    smallest, largest = (int(np.quantile(np.concatenate(tokens), share)) for share in (0.005, 0.995))
    edges = np.geomspace(max(1, smallest), 1.1 * largest + 1, 41)
    _draw_batches(panels["tokens"], results, tokens, edges, "tokens per batch, with padding")
    panels["tokens"].set_xscale("log")
    panels["padding"].xaxis.set_major_formatter("{x:.0%}")
    figure.legend(*panels["tokens"].get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    _draw_table(panels["table"], results)
    figure.savefig(path)


def _draw_lengths(axes: Axes, lengths: IntArray, token_kind: str) -> None:
    edges = np.unique(np.geomspace(1, max(2, int(lengths.max()) + 1), 50).astype(int))
    axes.hist(np.maximum(lengths, 1), bins=edges.tolist(), color="0.4")
    axes.set(xscale="log", xlabel="tokens per item", ylabel="items")
    axes.set_title(f"{len(lengths):,} items, {int(lengths.sum()):,} tokens\n{token_kind}", fontsize=7)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_batches(
    axes: Axes, results: list[BatchingResult], values: Sequence[np.ndarray], edges: np.ndarray, label: str
) -> None:
    """Draw shares of all batches, because the numbers of batches differ."""
    for result, color, of_batches in zip(results, _COLORS, values, strict=True):
        counts, _ = np.histogram(np.clip(of_batches, edges[0], edges[-1]), edges)
        axes.stairs(counts / counts.sum(), edges, color=color, linewidth=1.5, label=result.name)
    axes.set(xlabel=label, ylabel="share of the batches")
    axes.spines[["top", "right"]].set_visible(False)


def _draw_table(axes: Axes, results: list[BatchingResult]) -> None:
    cells = [list(result.cells()) for result in results]
    drawn = axes.table(cells, colLabels=COLUMNS, loc="center", edges="horizontal", colWidths=_COLUMN_WIDTHS)
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    axes.set_axis_off()
