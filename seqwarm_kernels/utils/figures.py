"""The style of every figure: how each implementation looks, axes, labels at lines, light and dark files.

Figures are drawn inside of `style`. matplotlib is imported by the functions, because it is optional.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .checks import check_matplotlib
from .files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


@dataclass(frozen=True)
class Look:
    """Color, marker and line of an implementation, the same in every panel of every figure."""

    color: str
    marker: str
    line: str = "-"
    width: float = 1.3


# Middle tones, readable on white and on a dark page. Markers and lines tell them apart without color.
_ORANGE, _AMBER, _BLUE, _GREEN = "#D9590A", "#BF8700", "#2C7FBF", "#1A9A72"
_PINK, _VIOLET, _CYAN, _GRAY = "#C55C9E", "#8464C0", "#3D9DB8", "#808080"

#: The look of every implementation and of every run, by name and without the backend.
LOOKS = {
    # attention
    "alibi_attention": Look(_ORANGE, "o", width=2.4),
    "alibi_attention, no skip": Look(_AMBER, "s", "--", 2.0),
    "FlexAttention": Look(_BLUE, "^"),
    "FlexAttention, rows cut": Look(_CYAN, "<", "--"),
    "FlexAttention on flash-attn-4": Look(_BLUE, ">", ":"),
    "SDPA flash, no bias": Look(_PINK, "D", "--"),
    "flash-attn-3, no bias": Look(_PINK, "h", "-."),
    "flash-attn-4, no bias": Look(_PINK, "d", ":"),
    "SDPA with bias mask": Look(_GREEN, "v"),
    "SDPA cuDNN, no bias": Look(_VIOLET, "P", "--"),
    "SDPA cuDNN with bias mask": Look(_VIOLET, "p"),
    "eager with bias": Look(_GRAY, "X", "-."),
    # resize_batch
    "resize_batch": Look(_ORANGE, "o", width=2.4),
    "resize_batch, out=BatchBuffers": Look(_AMBER, "s", "--", 2.0),
    "torch._foreach_copy_ to own storage": Look(_BLUE, "^"),
    "torch.compile of slice + contiguous": Look(_GREEN, "v"),
    # trainings
    "full length throughout": Look(_BLUE, "o", "--"),
    "sequence-length warmup": Look(_ORANGE, "s", width=2.0),
    "half the batch, full length": Look(_GRAY, "D", ":"),
    "the same, rate warmed up in 6 steps": Look(_AMBER, "X", "--"),
    "batch-size warmup": Look(_GRAY, "D", ":"),
    "longer learning-rate warmup": Look(_GREEN, "v", "-."),
    "clipped gradients": Look(_PINK, "P", ":"),
    "this package": Look(_ORANGE, "o", width=2.4),
    "eager, slicing": Look(_GRAY, "X", "-."),
    # steps of a ramp
    "segments": Look(_ORANGE, "o", width=2.4),
    "flatten": Look(_BLUE, "^", "--"),
    "flatten, dynamic=False": Look(_GRAY, "X", "-."),
    "flatten, after warmup_allocator": Look(_GREEN, "v"),
    # allocator
    "with warmup_allocator": Look(_ORANGE, "s", width=2.0),
    "without warmup_allocator": Look(_BLUE, "o", "--"),
    # exchanges between ranks
    "ring": Look(_GRAY, "X", "-."),
    "all-gather": Look(_BLUE, "^"),
    "Ulysses": Look(_GREEN, "v"),
    "halo": Look(_ORANGE, "o", width=2.4),
    # batching
    "random": Look(_GRAY, "X"),
    "short window": Look(_BLUE, "^"),
    "greedy (infinibatch)": Look(_GREEN, "v"),
    "BatchPlanner": Look(_AMBER, "s"),
    "BatchPlanner, packed": Look(_ORANGE, "o"),
}

#: What a figure is about, what it is compared with, and what differs from both.
ACCENT, QUIET, CONTRAST = _ORANGE, _GRAY, _BLUE
LABEL_SIZE = 9.5  #: points, of a text inside or beside the axes
LIGHT, DARK = "light", "dark"
_PAGES = {LIGHT: ("#FFFFFF", "#1F2328", "#D5D9DE"), DARK: ("#0D1117", "#E6EDF3", "#343B44")}  # page, ink, grid
_BACKENDS = (" native", " triton")


def look_of(name: str) -> Look:
    """The look of an implementation. The backend in its name does not matter."""
    for backend in _BACKENDS:
        name = name.replace(backend, "")
    return LOOKS[name]


@contextmanager
def style(theme: str = LIGHT) -> Iterator[None]:
    """matplotlib's settings for all figures that are made and drawn inside.

    Raises:
        ImportError: matplotlib is missing. The message says how to install it.
    """
    check_matplotlib()
    import matplotlib

    page, ink, grid = _PAGES[theme]
    settings: Any = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), page),
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), ink),
        "grid.color": grid,
        "axes.grid": True,
        "axes.axisbelow": True,
        **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
        **dict.fromkeys(("axes.formatter.useoffset", "legend.frameon"), False),
        **dict.fromkeys(("font.size", "axes.labelsize", "xtick.labelsize", "ytick.labelsize", "legend.fontsize"), 10),
        "axes.titlesize": 10.5,
        "axes.titlelocation": "left",
        "figure.titlesize": 11.5,
        "lines.markersize": 5.5,
        "figure.dpi": 150,
        "figure.constrained_layout.use": True,
        "svg.hashsalt": "",  # the same figure is the same file
    }
    with matplotlib.rc_context(settings):
        yield


def ink() -> str:
    """The color of text and of lines that are not an implementation's."""
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


def write_figure(draw: Callable[[], Figure], path: Path) -> None:
    """Write a figure as a PNG or an SVG, by the suffix of `path`."""
    write_atomically(path, svg(draw) if path.suffix.lower() == ".svg" else png(draw))


def svg(draw: Callable[[], Figure]) -> bytes:
    with style():
        drawn = io.BytesIO()
        draw().savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def png(draw: Callable[[], Figure], theme: str = LIGHT) -> bytes:
    """A figure as a PNG of at most 256 colors, which halves its size."""
    with style(theme):
        figure, drawn, reduced = draw(), io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png")
    from PIL import Image  # a dependency of matplotlib

    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def save_both(draw: Callable[[], Figure], path: Path) -> Path:
    """Write `name.png` for light pages, and `name_dark.png` beside it. Returns the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for theme, each in ((LIGHT, path), (DARK, path.with_stem(f"{path.stem}_dark"))):
        write_atomically(each, png(draw, theme))
    return path


def plot(axes: Axes, name: str, x: Sequence[float], y: Sequence[float], **options: Any) -> Line2D:
    """A line with the look of `name`. The name is the line's label, unless another is given."""
    look = look_of(name)
    shown = {"color": look.color, "marker": look.marker, "linestyle": look.line, "linewidth": look.width}
    (line,) = axes.plot(x, y, **{**shown, "label": name, "gid": name, **options})
    return line


def log_axis(axis: Axis, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers: at `ticks`, or at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    axis._set_axes_scale("log")  # type: ignore[attr-defined]  # Axes.set_xscale or set_yscale
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=20) if ticks is None else FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    plain_numbers(axis)


def plain_numbers(axis: Axis) -> None:
    """Ticks such as 0.5 and 16,384."""
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def short_numbers(axis: Axis) -> None:
    """Ticks in one unit for the whole axis: 2,000 or 20 k, 1.5 M, 3 B."""

    def shown(value: float, _: object) -> str:
        largest = max(map(abs, axis.get_view_interval()))
        unit, letter = next((each for each in _UNITS if largest >= max(20_000, 2 * each[0])), (1, ""))
        return f"{value / unit:,.6g}{letter}" if value else "0"

    axis.set_major_formatter(shown)


_UNITS = ((1e9, " B"), (1e6, " M"), (1e3, " k"))


#: A thin line from the left end of a label to a point.
_LEADER = {"arrowstyle": "-", "linewidth": 0.8, "relpos": (0, 0.5), "shrinkA": 1, "shrinkB": 4}


def label_lines(panels: Iterable[Axes], bold: str = "") -> None:
    """Write the label of each line right of its panel, at the height of the line's last point.

    Labels are moved apart vertically. A thin line leads from each to its last point. Call this last, with all panels of
    a figure: the limits of the axes must be final.
    """
    panels = list(panels)
    panels[0].figure.draw_without_rendering()  # type: ignore[union-attr]
    for axes in panels:
        _label_lines(axes, bold)


def _label_lines(axes: Axes, bold: str) -> None:
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    box = axes.get_window_extent()
    low, high = axes.get_ylim()
    points = [np.asarray(line.get_xydata())[-1].tolist() for line in lines]
    ends = [(x, min(max(y, low), high)) for x, y in points]
    heights = [(axes.transData.transform(end)[1] - box.y0) / box.height for end in ends]
    rows = max((str(line.get_label()).count("\n") + 1 for line in lines), default=1)
    spread = spread_out(heights, 1.3 * rows * LABEL_SIZE * axes.figure.dpi / 72 / box.height)
    for line, end, height in zip(lines, ends, spread, strict=True):
        axes.annotate(
            str(line.get_label()),
            end,
            (1.04, height),
            textcoords=axes.transAxes,
            verticalalignment="center",
            fontsize=LABEL_SIZE,
            fontweight="bold" if line.get_label() == bold else "normal",
            annotation_clip=False,
            arrowprops={**_LEADER, "color": line.get_color()},
        )


def spread_out(positions: Sequence[float], gap: float) -> list[float]:
    """Positions near the given ones, in the same order, with `gap` between neighbors."""
    order = sorted(range(len(positions)), key=lambda index: positions[index])
    upwards, downwards = list(positions), list(positions)
    for below, above in pairwise(order):
        upwards[above] = max(upwards[above], upwards[below] + gap)
    for below, above in reversed(list(pairwise(order))):
        downwards[below] = min(downwards[below], downwards[above] - gap)
    return [(up + down) / 2 for up, down in zip(upwards, downwards, strict=True)]


def mark(axes: Axes, text: str, *, x: float | None = None, y: float | None = None, at: float = 0.99) -> None:
    """A dashed line at `x` or at `y` over the whole axes, with a text beside it; `at` places the text along `y`."""
    look: dict[str, Any] = {"color": ink(), "linestyle": (0, (4, 3)), "linewidth": 1, "zorder": 1.5}
    small: dict[str, Any] = {"textcoords": "offset points", "fontsize": LABEL_SIZE}
    if x is not None:
        axes.axvline(x, **look)
        axes.annotate(text, (x, 0.98), (4, 0), xycoords=("data", "axes fraction"), va="top", **small)
    if y is not None:
        axes.axhline(y, **look)
        side = "right" if at > 0.5 else "left"
        axes.annotate(text, (at, y), (0, 3), xycoords=("axes fraction", "data"), ha=side, **small)
