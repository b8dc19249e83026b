"""The style of every figure, as settings of matplotlib, and the lines that several figures draw.

Figures are drawn inside of `style`. matplotlib is imported by the functions, because it is optional.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checks import check_matplotlib
from .files import open_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What a figure is about, what it is compared with, and what differs from both: readable on white and on a dark page.
ACCENT, QUIET, CONTRAST = "#D9590A", "#808080", "#2C7FBF"

#: The two runs that figures compare, and the options of their lines. Markers tell them apart without color.
FULL_LENGTH, WITH_WARMUP = "full length throughout", "sequence-length warmup"
RUNS: dict[str, dict[str, Any]] = {
    FULL_LENGTH: {"color": CONTRAST, "marker": "o", "linestyle": "--"},
    WITH_WARMUP: {"color": ACCENT, "marker": "s", "linewidth": 2.0},
}

PLAIN_NUMBERS = "{x:,.10g}"  #: for ticks such as 0.5 and 16,384


@contextmanager
def style() -> Iterator[None]:
    """matplotlib's settings for all figures that are made and drawn inside.

    Raises:
        ImportError: matplotlib is missing. The message says how to install it.
    """
    check_matplotlib()
    import matplotlib

    settings: Any = {
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#1F2328"),
        "grid.color": "#D5D9DE",
        "axes.grid": True,
        "axes.axisbelow": True,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("axes.formatter.useoffset", "legend.frameon"), False),
        **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 10),
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "figure.titlesize": 11.5,
        "lines.linewidth": 1.3,
        "lines.markersize": 5.5,
        "figure.dpi": 150,
        "figure.constrained_layout.use": True,
    }
    with matplotlib.rc_context(settings):
        yield


def ink() -> str:
    """The color of text and of lines that are no data."""
    import matplotlib

    return matplotlib.rcParams["text.color"]


def page() -> str:
    """The color behind everything."""
    import matplotlib

    return matplotlib.rcParams["figure.facecolor"]


def new_figure(width: float, height: float) -> Figure:
    """A figure in inches, without pyplot, so that it needs no display."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def plot_run(axes: Axes, name: str, x: Sequence[float], y: Sequence[float], **options: Any) -> None:
    """The line of one of `RUNS`."""
    axes.plot(x, y, **{**RUNS[name], "label": name, "gid": name, **options})


def name_lines(figure: Figure) -> None:
    """A legend below the panels, of the lines in the first one."""
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Write a figure in the format of the suffix of `path`, such as .png or .svg."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with style(), open_atomically(path) as file:
        draw().savefig(file, format=path.suffix[1:])
