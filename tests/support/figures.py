"""Checks of drawn figures: texts that overlap, numbers that are not written out, looks."""

import itertools
import re

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.text import Text

from bench.common.figures import look_of


def shown_texts(figure):
    """All texts that are drawn, with their boxes."""
    figure.draw_without_rendering()
    hidden = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in _hidden_ticks(axis)}
    hidden |= {text for axes in figure.axes if not axes.axison for text in axes.findobj(Text)}
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    box_of = Text.get_window_extent  # that of an annotation includes its arrow
    return [(text.get_text(), box_of(text).padded(-1)) for text in texts if text not in hidden]


def _hidden_ticks(axis):
    """Labels of ticks outside of the axes, and those on the other side."""
    low, high = sorted(axis.get_view_interval())
    for tick in (*axis.majorTicks, *axis.minorTicks):
        yield tick.label2
        if not low - 1e-6 * abs(low) <= tick.get_loc() <= high + 1e-6 * abs(high):
            yield tick.label1


def check_readable(figure):
    """No two texts overlap, none is cut off, and numbers are written out."""
    found = shown_texts(figure)
    assert found
    page = figure.bbox.padded(1)
    for text, box in found:
        inside = page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1
        assert not re.search(r"mathdefault|\de[+-]?\d", text), f"{text!r} is not a plain number"
        assert inside, f"{text!r} is cut off"
    for (one, box), (other, other_box) in itertools.combinations(found, 2):
        assert not box.overlaps(other_box), f"{one!r} and {other!r} overlap"


def drawn(axes):
    """The points of each implementation in a panel, by name."""
    lines = [line for line in axes.lines if line.get_gid()]
    return {line.get_gid(): list(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in lines}


def check_looks(figure, names):
    """Exactly `names` are drawn. Each has its color and marker, in the legend, too."""
    found = set()
    for axes in figure.axes:
        for line in (line for line in axes.lines if line.get_gid()):
            look = look_of(line.get_gid())
            assert line.get_color() == look["color"], line.get_gid()
            assert line.get_marker() in (look["marker"], "none", "None"), line.get_gid()
            found.add(line.get_gid())
    assert found == set(names)
    for legend in figure.legends:
        handles = dict(zip((text.get_text() for text in legend.get_texts()), legend.legend_handles, strict=True))
        for name in found & handles.keys():
            assert handles[name].get_color() == look_of(name)["color"]
