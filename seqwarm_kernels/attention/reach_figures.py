"""Figures of what `skip_tolerance` leaves out: the tiles that each head visits, and the share of the keys by length.

They show what the kernels do with queries and keys of a standard normal distribution. The reach of trained heads
depends on their queries and keys; `attended_share` reports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..ops import backends
from ..ops.alibi_attention.schema import RANGE_BLOCK
from ..utils.checks import check_int
from ..utils.figures import ACCENT, LABEL_SIZE, QUIET, ink, new_figure, page, plain_numbers
from .attended_share import attended_ranges
from .slopes import alibi_slopes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN, SKIPPED, VISITED = range(3)  #: values of `visited_tiles`


@dataclass(frozen=True)
class Reach:
    """What each head visits in causal attention of one sequence, for standard normal queries and keys."""

    length: int
    head_dim: int
    slopes: list[float]
    ranges: np.ndarray  #: (heads, ⌈length / RANGE_BLOCK⌉, 2) int32: start and end of the keys a block of queries visits
    shares: list[float]  #: visited share of the visible keys, for each head

    @staticmethod
    @torch.no_grad()
    def of(num_heads: int, length: int, head_dim: int = 64, seed: int = 0) -> Reach:
        """Run causal attention with ALiBi's slopes on the CPU.

        Raises:
            ValueError: a number is out of range, or no backend of the CPU skips keys.
        """
        check_int("num_heads", num_heads, minimum=1)
        check_int("length", length, minimum=1)
        if backends.choose("alibi_attention", "cpu", None, torch.float32) == "reference":
            raise ValueError("the reference visits all keys, and the native kernels are not built: run `info`")
        generator = torch.Generator().manual_seed(seed)
        query, key, value = (torch.randn(1, num_heads, length, head_dim, generator=generator) for _ in range(3))
        slopes = alibi_slopes(num_heads)
        ranges, shares = attended_ranges(query, key, value, slopes)
        return Reach(length, head_dim, slopes.tolist(), ranges[0].numpy(), shares[0].tolist())

    @property
    def steepest_first(self) -> list[int]:
        """The heads, from the steepest to the flattest slope."""
        return sorted(range(len(self.slopes)), key=lambda head: -self.slopes[head])

    def tiles(self, head: int) -> np.ndarray:
        """(blocks, blocks) of HIDDEN, SKIPPED and VISITED: tiles of RANGE_BLOCK queries and as many keys."""
        starts = np.arange(0, self.length, RANGE_BLOCK)
        visible = starts[None] <= starts[:, None]  # the diagonal tile and those before it
        begin, end = self.ranges[head, :, :1], self.ranges[head, :, 1:]
        visited = (starts[None] < end) & (starts[None] + RANGE_BLOCK > begin)
        return np.where(visible, np.where(visited, VISITED, SKIPPED), HIDDEN)


def reach_figure(reach: Reach) -> Figure:
    """The tiles that each head visits, from the steepest to the flattest slope."""
    from matplotlib.colors import ListedColormap

    columns = min(6, len(reach.slopes))
    rows = -(-len(reach.slopes) // columns)
    figure = new_figure(max(2 * columns, 6) + 0.8, 2.35 * rows + 1.4)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colors = ListedColormap([page(), _mixed(QUIET, 0.35), ACCENT])
    extent = (0, reach.length, reach.length, 0)
    for axes, head in zip(panels.flat, reach.steepest_first, strict=False):
        axes.imshow(reach.tiles(head), colors, vmin=HIDDEN, vmax=VISITED, extent=extent, interpolation="nearest")
        axes.set_title(f"{_head(reach, head)}\nvisits {_percent(reach.shares[head])}")
        axes.grid(visible=False)
        axes.set_xticks([0, reach.length // 2])
        axes.set_yticks([0, reach.length // 2, reach.length])
        plain_numbers(axes.xaxis)
        plain_numbers(axes.yaxis)
    for axes in panels.flat[len(reach.slopes) :]:
        axes.set_axis_off()
    figure.supxlabel(f"key (normal queries and keys of {reach.head_dim} components)", fontsize=10)
    figure.supylabel("query", fontsize=10)
    _tile_legend(figure)
    return figure


def _percent(share: float) -> str:
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def _head(reach: Reach, head: int) -> str:
    return f"head {head + 1}, slope {reach.slopes[head]:.3g}"


def _tile_legend(figure: Figure) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=ACCENT), Patch(color=_mixed(QUIET, 0.35)), Patch(facecolor=page(), edgecolor=ink())]
    names = ["visited", "skipped: too far to matter", "hidden: later than the query"]
    figure.legend(patches, names, loc="outside upper center", ncols=3)


def share_figure(reaches: Sequence[Reach]) -> Figure:
    """The share of the visible keys that each head visits at each length: a map of heads by lengths."""
    from matplotlib.colors import LinearSegmentedColormap

    first = reaches[0]
    shares = np.array([[reach.shares[head] for reach in reaches] for head in first.steepest_first])
    table = np.vstack([shares, shares.mean(0, keepdims=True)])
    figure = new_figure(max(1.1 * len(reaches) + 2.2, 6), 0.36 * len(shares) + 1.7)
    axes = figure.subplots()
    colors = LinearSegmentedColormap.from_list("shares", [page(), _mixed(ACCENT, 0.7)])
    axes.imshow(table, colors, vmin=0, vmax=1, aspect="auto")
    for (row, column), share in np.ndenumerate(table):
        axes.text(column, row, _percent(share), ha="center", va="center", fontsize=LABEL_SIZE)
    axes.axhline(len(shares) - 0.5, color=ink(), linewidth=1)
    axes.grid(visible=False)
    axes.set_xticks(range(len(reaches)), [f"{reach.length:,}" for reach in reaches])
    axes.set_yticks(range(len(table)), [*(_head(first, head) for head in first.steepest_first), "all heads"])
    axes.set_xlabel(f"tokens in a sequence\n(normal queries and keys of {first.head_dim} components)")
    figure.suptitle("Share of the visible keys that causal attention visits")
    return figure


def _mixed(color: str, share: float) -> str:
    """A color on the page with this opacity."""
    from matplotlib.colors import to_hex, to_rgb

    red, green, blue = share * np.array(to_rgb(color)) + (1 - share) * np.array(to_rgb(page()))
    return to_hex((red, green, blue))
