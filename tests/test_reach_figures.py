"""Figures of what heads visit."""

import pytest
import torch

from bench.pictures import share_figure
from seqwarm_kernels.attention.reach import Reach, ReachSettings, measure_reach
from seqwarm_kernels.cli.reach_figure import HIDDEN, SKIPPED, VISITED, reach_figure, steepest_first, visited_tiles
from seqwarm_kernels.ops import backends
from seqwarm_kernels.utils.figures import style

HEADS, LENGTH = 4, 1024


def measured(heads, length, **options):
    if backends.choose("alibi_attention", "cpu", None, torch.float32) == "reference":
        pytest.skip("the native kernels are not built")
    return measure_reach(ReachSettings(heads, length, **options))


@pytest.fixture(scope="module")
def reach():
    return measured(HEADS, LENGTH)


def made(visited, visible, length=128):
    slopes = 0.5 ** torch.arange(1.0, len(visited) + 1)
    return Reach(ReachSettings(len(visited), length), "native", slopes, torch.tensor(visited), torch.tensor(visible))


def test_visited_tiles_of_known_ranges():
    visible = [[0, 32], [0, 64], [0, 96], [0, 128]]
    tiles = visited_tiles(made([[[0, 32], [0, 64], [32, 96], [70, 128]]], visible), 0)
    h, s, v = HIDDEN, SKIPPED, VISITED
    assert tiles.tolist() == [[v, h, h, h], [v, v, h, h], [s, v, v, h], [s, s, v, v]]


def test_without_a_causal_mask_nothing_is_hidden():
    assert (visited_tiles(measured(1, 100, causal=False), 0) == VISITED).all()
    window = visited_tiles(measured(1, 100, causal=False, window=10), 0)
    assert [(row == HIDDEN).sum() for row in window] == [1, 1, 1, 1]


def test_flat_heads_visit_more(reach):
    assert steepest_first(reach) == [0, 1, 2, 3]
    assert steepest_first(measured(3, 64)) == [2, 0, 1]  # the third slope lies between those of two heads
    visited = [int((visited_tiles(reach, head) == VISITED).sum()) for head in steepest_first(reach)]
    assert visited == sorted(visited)


def test_a_share_is_not_rounded_to_all():
    pytest.importorskip("matplotlib")
    for keys, text in ((20_000, "100%"), (19_940, ">99%"), (19_880, "99%"), (0, "0%")):
        with style():
            figure = share_figure([made([[[0, keys]]], [[0, 20_000]])])
        assert [label.get_text() for label in figure.axes[0].texts] == [text, text]


def test_the_figure_of_tiles(reach):
    figures = pytest.importorskip("tests.support.figures")
    with style():
        figure = reach_figure(reach)
        figures.check_readable(figure)
        for axes, head in zip(figure.axes, steepest_first(reach), strict=True):
            [image] = axes.images
            assert (image.get_array() == visited_tiles(reach, head)).all()
            title = f"head {head}, slope {reach.slopes[head]:.3g}\nvisits {reach.shares()[head]:.0%}"
            assert axes.get_title(loc="left") == title
        names = ["visited", "skipped: too far to matter", "hidden from the query"]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == names
        assert "key (random queries and keys of 64 components)" in figures.texts_of(figure)
