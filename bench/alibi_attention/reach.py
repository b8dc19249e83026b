"""What heads of causal attention visit, on random queries and keys, and the figures of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seqwarm_kernels.attention.calls import DEFAULT_SKIP_TOLERANCE, DenseCall, check_dense
from seqwarm_kernels.attention.slopes import alibi_slopes
from seqwarm_kernels.ops.alibi_attention.schema import RANGE_BLOCK
from seqwarm_kernels.utils.figures import ACCENT, PLAIN_NUMBERS, QUIET, ink, new_figure, page

from ..common.figures import LABEL_SIZE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN, SKIPPED, VISITED = range(3)  #: values of `Reach.tiles`


@dataclass(frozen=True)
class Reach:
    """The keys from the first to the last one that each block of RANGE_BLOCK queries visits."""

    length: int
    head_dim: int
    slopes: Tensor  #: (heads,)
    visited: np.ndarray  #: (heads, blocks, 2), first key and end
    visible: np.ndarray  #: (blocks, 2), the same if nothing is skipped

    @cached_property
    def shares(self) -> np.ndarray:
        """For each head, the share of the visible keys that it visits."""
        visited, visible = (np.diff(ranges)[..., 0].sum(-1) for ranges in (self.visited, self.visible))
        return visited / visible

    def steepest_first(self) -> list[int]:
        """The heads, from the steepest to the flattest slope."""
        return self.slopes.argsort(descending=True).tolist()

    def title(self, head: int) -> str:
        return f"head {head}, slope {self.slopes[head]:.3g}"

    def tiles(self, head: int) -> np.ndarray:
        """(blocks, blocks) of HIDDEN, SKIPPED and VISITED: tiles of RANGE_BLOCK queries and as many keys."""
        starts = np.arange(0, self.length, RANGE_BLOCK)
        visited, visible = (
            (starts < ranges[:, 1:]) & (starts + RANGE_BLOCK > ranges[:, :1])
            for ranges in (self.visited[head], self.visible)
        )
        return np.where(visited, VISITED, np.where(visible, SKIPPED, HIDDEN))


@torch.no_grad()
def random_reach(heads: int, length: int, head_dim: int = 64) -> Reach:
    """The reach of heads with the usual slopes in the native kernels, on normal queries and keys."""
    query, key = torch.randn(2, 1, heads, length, head_dim, generator=torch.Generator().manual_seed(0))
    slopes = alibi_slopes(heads)

    def ranges(heads: int, skip_tolerance: float) -> np.ndarray:
        keys = key[:, :heads]
        call = DenseCall(query[:, :heads], keys, keys, slopes[:heads], skip_tolerance=skip_tolerance, backend="native")
        operator, tensors, options = check_dense(call)
        return operator(*tensors, *options)[-1][0].unflatten(1, (-1, 2)).numpy()

    # All heads see the same keys.
    return Reach(length, head_dim, slopes, ranges(heads, DEFAULT_SKIP_TOLERANCE), ranges(1, 0.0)[0])


def percent(share: float) -> str:
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def tiles_figure(reach: Reach) -> Figure:
    """The tiles that each head visits."""
    from matplotlib.colors import ListedColormap, to_rgba
    from matplotlib.patches import Patch

    columns = min(6, len(reach.slopes))
    rows = -(-len(reach.slopes) // columns)
    figure = new_figure(max(2 * columns, 6) + 0.8, 2.35 * rows + 1.4)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colors = ListedColormap([to_rgba(page()), to_rgba(QUIET, 0.35), to_rgba(ACCENT)])
    length = reach.length
    for axes, head in zip(panels.flat, reach.steepest_first(), strict=True):
        extent = (0, length, length, 0)
        axes.imshow(reach.tiles(head), colors, vmin=HIDDEN, vmax=VISITED, extent=extent, interpolation="nearest")
        axes.set_title(f"{reach.title(head)}\nvisits {percent(reach.shares[head])}")
        axes.grid(visible=False)
        axes.set(xticks=[0, length // 2], yticks=[0, length // 2, length])
        axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    figure.supxlabel(f"key (random queries and keys of {reach.head_dim} components)", fontsize=10)
    figure.supylabel("query", fontsize=10)
    patches = [Patch(color=ACCENT), Patch(color=QUIET, alpha=0.35), Patch(facecolor=page(), edgecolor=ink())]
    names = ["visited", "skipped: too far to matter", "hidden from the query"]
    figure.legend(patches, names, loc="outside upper center", ncols=3)
    return figure


def shares_figure(reaches: Sequence[Reach]) -> Figure:
    """The share of the visible keys that each head visits at each length: a map of heads by lengths."""
    from matplotlib.colors import LinearSegmentedColormap, to_rgba

    first = reaches[0]
    heads = first.steepest_first()
    shares = np.array([reach.shares[heads] for reach in reaches]).T
    table = np.vstack([shares, shares.mean(0, keepdims=True)])
    figure = new_figure(max(1.1 * len(reaches) + 2.2, 6), 0.36 * len(shares) + 1.7)
    axes = figure.subplots()
    colors = LinearSegmentedColormap.from_list("shares", [to_rgba(page()), to_rgba(ACCENT, 0.7)])
    axes.imshow(table, colors, vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(table):
        axes.text(column, row, percent(share), ha="center", va="center", fontsize=LABEL_SIZE)
    axes.axhline(len(shares) - 0.5, color=ink(), linewidth=1)
    axes.grid(visible=False)
    axes.set_xticks(range(len(reaches)), [f"{reach.length:,}" for reach in reaches])
    axes.set_yticks(range(len(table)), [*map(first.title, heads), "all heads"])
    axes.set_xlabel(f"tokens in a sequence\n(random queries and keys of {first.head_dim} components)")
    figure.suptitle("Share of the visible keys that causal attention visits")
    return figure
