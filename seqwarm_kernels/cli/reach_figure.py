"""A figure of what `skip_tolerance` leaves out: the tiles that each head visits.

It shows what the kernels do with random normal queries and keys. The reach of trained heads depends on their own;
`attended_share` reports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from ..attention.reach import Reach
from ..ops.alibi_attention.schema import RANGE_BLOCK
from ..utils.figures import ACCENT, PLAIN_NUMBERS, QUIET, ink, new_figure, page

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HIDDEN, SKIPPED, VISITED = range(3)  #: values of `visited_tiles`


def steepest_first(reach: Reach) -> list[int]:
    """The heads, from the steepest to the flattest slope."""
    return sorted(range(len(reach.slopes)), key=lambda head: -reach.slopes[head])


def visited_tiles(reach: Reach, head: int) -> np.ndarray:
    """(blocks, blocks) of HIDDEN, SKIPPED and VISITED: tiles of RANGE_BLOCK queries and as many keys."""
    starts = np.arange(0, reach.settings.length, RANGE_BLOCK)

    def touched(ranges: Tensor) -> np.ndarray:
        begin, end = ranges.numpy()[:, :1], ranges.numpy()[:, 1:]
        return (starts < end) & (starts + RANGE_BLOCK > begin)

    return np.where(touched(reach.visited[head]), VISITED, np.where(touched(reach.visible), SKIPPED, HIDDEN))


def reach_figure(reach: Reach) -> Figure:
    """The tiles that each head visits, from the steepest to the flattest slope."""
    from matplotlib.colors import ListedColormap, to_rgba
    from matplotlib.patches import Patch

    columns = min(6, len(reach.slopes))
    rows = -(-len(reach.slopes) // columns)
    figure = new_figure(max(2 * columns, 6) + 0.8, 2.35 * rows + 1.4)
    panels = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    colors = ListedColormap([to_rgba(page()), to_rgba(QUIET, 0.35), to_rgba(ACCENT)])
    length, shares = reach.settings.length, reach.shares()
    extent = (0, length, length, 0)
    for axes, head in zip(panels.flat, steepest_first(reach), strict=False):
        axes.imshow(
            visited_tiles(reach, head), colors, vmin=HIDDEN, vmax=VISITED, extent=extent, interpolation="nearest"
        )
        axes.set_title(f"{head_title(reach, head)}\nvisits {percent(shares[head])}")
        axes.grid(visible=False)
        axes.set_xticks([0, length // 2])
        axes.set_yticks([0, length // 2, length])
        axes.xaxis.set_major_formatter(PLAIN_NUMBERS)
        axes.yaxis.set_major_formatter(PLAIN_NUMBERS)
    for axes in panels.flat[len(reach.slopes) :]:
        axes.set_axis_off()
    figure.supxlabel(f"key (random queries and keys of {reach.settings.head_dim} components)", fontsize=10)
    figure.supylabel("query", fontsize=10)
    patches = [Patch(color=ACCENT), Patch(color=QUIET, alpha=0.35), Patch(facecolor=page(), edgecolor=ink())]
    names = ["visited", "skipped: too far to matter", "hidden from the query"]
    figure.legend(patches, names, loc="outside upper center", ncols=3)
    return figure


def percent(share: float) -> str:
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def head_title(reach: Reach, head: int) -> str:
    return f"head {head}, slope {reach.slopes[head]:.3g}"
