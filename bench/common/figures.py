"""How the figures of benchmarks look: each implementation, labels at lines, files for light and dark pages."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from seqwarm_kernels.utils.figures import ACCENT, CONTRAST, PLAIN_NUMBERS, QUIET, RUNS, ink, style
from seqwarm_kernels.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# Middle tones, readable on white and on a dark page. Markers and lines tell them apart without color.
_ORANGE, _BLUE, _GRAY = ACCENT, CONTRAST, QUIET
_AMBER, _GREEN, _PINK, _VIOLET, _CYAN = "#BF8700", "#1A9A72", "#C55C9E", "#8464C0", "#3D9DB8"


def _look(color: str, marker: str, line: str = "-", width: float = 1.3) -> dict[str, Any]:
    return {"color": color, "marker": marker, "linestyle": line, "linewidth": width}


#: Options of the lines in figures: of implementations and of runs, by name and without the backend.
LOOKS: dict[str, dict[str, Any]] = {
    **RUNS,
    # attention
    "alibi_attention": _look(_ORANGE, "o", width=2.4),
    "alibi_attention, no skip": _look(_AMBER, "s", "--", 2.0),
    "FlexAttention": _look(_BLUE, "^"),
    "SDPA flash, no bias": _look(_PINK, "D", "--"),
    "SDPA with bias mask": _look(_GREEN, "v"),
    "SDPA cuDNN, no bias": _look(_VIOLET, "P", "--"),
    "SDPA cuDNN with bias mask": _look(_VIOLET, "p"),
    "eager with bias": _look(_GRAY, "X", "-."),
    # resize_batch
    "resize_batch": _look(_ORANGE, "o", width=2.4),
    "resize_batch, out=BatchBuffers": _look(_AMBER, "s", "--", 2.0),
    "torch._foreach_copy_ to own storage": _look(_BLUE, "^"),
    "torch.compile of slice + contiguous": _look(_GREEN, "v"),
    # trainings
    "half the batch, full length": _look(_GRAY, "D", ":"),
    "the same, rate warmed up in 6 steps": _look(_AMBER, "X", "--"),
    "batch-size warmup": _look(_GRAY, "D", ":"),
    "longer learning-rate warmup": _look(_GREEN, "v", "-."),
    "clipped gradients": _look(_PINK, "P", ":"),
    "this package": _look(_ORANGE, "o", width=2.4),
    "eager, slicing": _look(_GRAY, "X", "-."),
    # steps of a ramp
    "segments": _look(_ORANGE, "o", width=2.4),
    "flatten": _look(_BLUE, "^", "--"),
    "flatten, dynamic=False": _look(_GRAY, "X", "-."),
    "flatten, after warmup_allocator": _look(_GREEN, "v"),
    # allocator
    "with warmup_allocator": _look(_ORANGE, "s", width=2.0),
    "without warmup_allocator": _look(_BLUE, "o", "--"),
    # exchanges between ranks
    "ring": _look(_GRAY, "X", "-."),
    "all-gather": _look(_BLUE, "^"),
    "Ulysses": _look(_GREEN, "v"),
    "halo": _look(_ORANGE, "o", width=2.4),
}

LABEL_SIZE = 9.5  #: points, of a text inside or beside the axes
_BACKENDS = (" native", " triton")

#: Settings of figures for dark pages.
_DARK: Any = {
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "#0D1117"),
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), "#E6EDF3"),
    "grid.color": "#343B44",
}


def look_of(name: str) -> dict[str, Any]:
    """Options of the line of an implementation. The backend in its name does not matter."""
    for backend in _BACKENDS:
        name = name.replace(backend, "")
    return LOOKS[name]


def png(draw: Callable[[], Figure], *, dark: bool = False) -> bytes:
    """A figure as a PNG of at most 256 colors, which halves its size."""
    import matplotlib
    from PIL import Image  # a dependency of matplotlib

    drawn, reduced = io.BytesIO(), io.BytesIO()
    with style(), matplotlib.rc_context(_DARK if dark else {}):
        draw().savefig(drawn, format="png")
    image = Image.open(drawn).convert("RGB").quantize(256, dither=Image.Dither.NONE)
    image.save(reduced, format="png", optimize=True)
    return reduced.getvalue()


def save_both(draw: Callable[[], Figure], path: Path) -> Path:
    """Write `name.png` for light pages, and `name_dark.png` beside it. Returns the first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, png(draw))
    write_atomically(path.with_stem(f"{path.stem}_dark"), png(draw, dark=True))
    return path


def plot(axes: Axes, name: str, x: Sequence[float], y: Sequence[float], **options: Any) -> Line2D:
    """A line with the look of `name`. The name is the line's label, unless another is given."""
    (line,) = axes.plot(x, y, **{**look_of(name), "label": name, "gid": name, **options})
    return line


def log_axis(axis: Axis, ticks: Sequence[float] | None = None) -> None:
    """A logarithmic axis with plain numbers: at `ticks`, or at 1, 2 and 5 times the powers of ten."""
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    axis._set_axes_scale("log")  # type: ignore[attr-defined]  # Axes.set_xscale or set_yscale
    axis.set_major_locator(LogLocator(10, subs=(1, 2, 5), numticks=20) if ticks is None else FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(PLAIN_NUMBERS)


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
