"""Checks of drawn figures: labels that overlap, powers of ten and offsets, looks."""

import itertools
import re

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.text import Text

from seqwarm_kernels.utils.figures import look_of


def texts(figure):
    return [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]


def shown_texts(figure):
    """All texts that are drawn, with their boxes. Ticks outside of the axes are not drawn."""
    figure.draw_without_rendering()
    found = []
    for text in texts(figure):
        axes = text.axes
        labels = [] if axes is None else [*_ticks(axes.xaxis), *_ticks(axes.yaxis)]
        is_tick = axes is not None and text in {
            t
            for axis in (axes.xaxis, axes.yaxis)
            for tick in (*axis.majorTicks, *axis.minorTicks)
            for t in (tick.label1, tick.label2)
        }
        if (not is_tick or text in labels) and (axes is None or axes.get_visible()):
            found.append((text.get_text(), text.get_window_extent().padded(-1)))
    return found


def _ticks(axis):
    low, high = sorted(axis.get_view_interval())
    margin = 1e-6 * abs(high - low)
    ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
    return [
        tick.label1 for tick in ticks if tick.label1.get_visible() and low - margin <= tick.get_loc() <= high + margin
    ]


def check_readable(figure):
    """No two texts overlap, none is cut off, and numbers are written out."""
    found = shown_texts(figure)
    assert found
    page = figure.bbox.padded(1)
    for text, box in found:
        assert page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1, f"{text} is cut off"
        assert not re.search(r"mathdefault|\d+e[+-]?\d", text), f"{text} is no plain number"
    for (one, box), (other, other_box) in itertools.combinations(found, 2):
        assert not box.overlaps(other_box), f"{one!r} and {other!r} overlap"


def drawn_lines(axes):
    """The lines of implementations, by name."""
    return {line.get_gid(): line for line in axes.lines if line.get_gid()}


def check_looks(figure, names):
    """Every line of an implementation has its own color, marker and line style, and exactly `names` are drawn."""
    found = set()
    for axes in figure.axes:
        for line in axes.lines:
            if line.get_gid() is None:
                continue
            look = look_of(line.get_gid())
            assert (line.get_color(), line.get_marker()) == (look.color, look.marker), line.get_gid()
            found.add(line.get_gid())
    assert found == set(names)
