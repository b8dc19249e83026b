"""The comparison as a figure: histograms of the item lengths and of the batches, and the padding of each way."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...utils.checks import check_matplotlib, check_path
from ...utils.figures import QUIET, ink, log_axis, look_of, new_figure, plain_numbers, png
from ...utils.files import write_atomically
from ..batch_planning.plan import IntArray, as_lengths
from .comparison import BatchingResult, check_results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: The ways of `compare` in order, as named in `LOOKS`.
WAYS = ("random", "short window", "greedy (infinibatch)", "BatchPlanner", "BatchPlanner, packed")

_BINS = 40
_POWERS_OF_TEN = [10.0**power for power in range(10)]


@dataclass(frozen=True)
class Histogram:
    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class BatchHistograms:
    """The batches of one way of batching."""

    name: str
    batches: int
    padding: float  #: share of padding in all tokens
    budget_used: float | None  #: share of the token budget that is text
    max_tokens: int | None  #: the token budget, None without one
    padding_of_a_batch: Histogram
    tokens_of_a_batch: Histogram  #: padding included


@dataclass(frozen=True)
class PaddingHistograms:
    """All that the figure shows. Plain values, so that they can be written as JSON."""

    items: int
    tokens: int
    token_kind: str  #: what a token is
    lengths: Histogram  #: tokens of an item
    ways: list[BatchHistograms]

    @staticmethod
    def of(lengths: IntArray, results: list[BatchingResult], token_kind: str) -> PaddingHistograms:
        length_edges = np.unique(np.geomspace(1, max(2, int(lengths.max()) + 1), _BINS + 10).astype(int))
        sizes = np.concatenate([each.padded_tokens for each in results])
        smallest, largest = (int(np.quantile(sizes, share)) for share in (0.005, 0.995))
        size_edges = np.geomspace(max(1, smallest), 1.1 * largest + 1, _BINS + 1)
        ways = [
            BatchHistograms(
                name=each.name,
                batches=len(each.items),
                padding=each.padding,
                budget_used=each.budget_used,
                max_tokens=each.max_tokens,
                padding_of_a_batch=_histogram(_padding_shares(each), np.linspace(0, 1, _BINS + 1)),
                tokens_of_a_batch=_histogram(each.padded_tokens, size_edges),
            )
            for each in results
        ]
        of_lengths = _histogram(np.maximum(lengths, 1), length_edges)
        return PaddingHistograms(len(lengths), int(lengths.sum()), token_kind, of_lengths, ways)


def _padding_shares(result: BatchingResult) -> np.ndarray:
    return (result.padded_tokens - result.tokens) / np.maximum(result.padded_tokens, 1)


def _histogram(values: np.ndarray, edges: np.ndarray) -> Histogram:
    """Values outside of the edges count in the first or the last bin."""
    counts, _ = np.histogram(np.clip(values, edges[0], edges[-1]), edges)
    return Histogram(edges.tolist(), counts.tolist())


def draw(lengths: IntArray, results: list[BatchingResult], token_kind: str, path: str | Path) -> None:
    """Draw the comparison as a PNG. Needs matplotlib.

    Args:
        lengths: (items,) int64, number of tokens in each item.
        results: returned by `compare`.
        token_kind: what a token is, for the title.
        path: the PNG to write.

    Raises:
        ImportError: matplotlib is missing.
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
    check_matplotlib()
    histograms = PaddingHistograms.of(lengths, results, token_kind)
    write_atomically(path, png(functools.partial(padding_figure, histograms)))


def padding_figure(histograms: PaddingHistograms) -> Figure:
    """A row for each way of batching, so that no histogram hides another."""
    ways = histograms.ways
    figure = new_figure(11, 2.2 + 1.1 * len(ways))
    grid = figure.add_gridspec(2, 1, height_ratios=(2, 1.1 * len(ways)))
    top, below = figure.add_subfigure(grid[0]), figure.add_subfigure(grid[1])
    _draw_lengths(top.subplots(), histograms)
    panels = below.subplots(len(ways), 2, sharex="col", squeeze=False)
    for index, (way, row) in enumerate(zip(ways, panels, strict=True)):
        color = look_of(WAYS[index]).color
        for axes, histogram in zip(row, (way.padding_of_a_batch, way.tokens_of_a_batch), strict=True):
            _draw_histogram(axes, histogram, color)
        row[0].set_title(way.name)
        row[1].set_title(_totals(way))
        if way.max_tokens is not None:
            row[1].axvline(way.max_tokens, color=ink(), linestyle=(0, (4, 3)), linewidth=1)
    for axes in panels.flat:
        axes.set_ylim(0, 1.05)
        axes.set_yticks([0, 1], ["0", "all"])
    left, right = panels[-1]
    left.set(xlabel="padding of a batch", xlim=(0, 1))
    left.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    right.set_xlabel("tokens of a batch, padding included; dashed: the budget")
    log_axis(right.xaxis, _POWERS_OF_TEN)
    below.supylabel("share of the batches", fontsize=10)
    return figure


def _draw_lengths(axes: Axes, histograms: PaddingHistograms) -> None:
    axes.stairs(histograms.lengths.counts, histograms.lengths.edges, color=QUIET, fill=True)
    axes.set(xlabel=f"tokens of an item ({histograms.token_kind})", ylabel="items")
    axes.set_title(f"{histograms.items:,} items, {histograms.tokens:,} tokens")
    log_axis(axes.xaxis, _POWERS_OF_TEN)
    plain_numbers(axes.yaxis)


def _draw_histogram(axes: Axes, histogram: Histogram, color: str) -> None:
    """Draw shares of all batches, because the numbers of batches differ."""
    shares = np.asarray(histogram.counts) / sum(histogram.counts)
    axes.stairs(shares, histogram.edges, color=color, fill=True)


def _totals(way: BatchHistograms) -> str:
    used = "" if way.budget_used is None else f", {way.budget_used:.1%} of the budget used"
    return f"{way.batches:,} batches, {way.padding:.1%} padding{used}"
