"""What heads visit: the data, and both figures."""

import numpy as np
import pytest
import torch

from seqwarm_kernels import alibi_slopes, attended_share
from seqwarm_kernels.attention import reach_figures
from seqwarm_kernels.attention.reach_figures import HIDDEN, SKIPPED, VISITED, Reach, reach_figure, share_figure
from seqwarm_kernels.ops import backends
from seqwarm_kernels.utils.figures import style

HEADS, LENGTH = 4, 1024


@pytest.fixture(scope="module")
def reach():
    if backends.choose("alibi_attention", "cpu", None, torch.float32) == "reference":
        pytest.skip("the native kernels are not built")
    return Reach.of(HEADS, LENGTH)


def test_the_ranges_are_those_of_attention(reach):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, HEADS, LENGTH, 64, generator=generator) for _ in range(3))
    assert reach.slopes == alibi_slopes(HEADS).tolist()
    assert reach.shares == attended_share(query, key, value)[0].tolist()
    assert reach.ranges.shape == (HEADS, LENGTH // 32, 2)
    assert min(reach.shares) < 0.5 < max(reach.shares)
    for head, share in enumerate(reach.shares):
        visited, skipped = ((reach.tiles(head) == each).sum() for each in (VISITED, SKIPPED))
        assert visited / (visited + skipped) == pytest.approx(share, abs=0.03)


def test_visited_tiles_of_known_ranges():
    ranges = np.array([[[0, 32], [0, 64], [32, 96], [70, 128]]], dtype=np.int32)
    tiles = Reach(128, 64, [0.5], ranges, [1.0]).tiles(0)
    h, s, v = HIDDEN, SKIPPED, VISITED
    assert tiles.tolist() == [[v, h, h, h], [v, v, h, h], [s, v, v, h], [s, s, v, v]]


def test_a_length_that_is_not_a_multiple_of_a_block(reach):
    assert Reach.of(1, 50).tiles(0).tolist() == [[VISITED, HIDDEN], [VISITED, VISITED]]


def test_flat_heads_visit_more(reach):
    assert reach.steepest_first == [0, 1, 2, 3]
    assert Reach.of(3, 64).steepest_first == [2, 0, 1]  # the third slope lies between those of two heads
    visited = [int((reach.tiles(head) == VISITED).sum()) for head in reach.steepest_first]
    assert visited == sorted(visited)


def test_a_user_without_kernels_that_skip(monkeypatch):
    monkeypatch.setattr(reach_figures.backends, "choose", lambda *_: "reference")
    with pytest.raises(ValueError, match="the reference visits all keys"):
        Reach.of(HEADS, LENGTH)


@pytest.mark.parametrize(("heads", "length", "name"), [(0, 8, "num_heads"), (1, 0, "length")])
def test_bad_numbers(heads, length, name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Reach.of(heads, length)


@pytest.mark.parametrize(("share", "text"), [(1.0, "100%"), (0.997, ">99%"), (0.994, "99%"), (0.0, "0%")])
def test_a_share_is_not_rounded_to_all(share, text):
    pytest.importorskip("matplotlib")
    with style():
        figure = share_figure([Reach(64, 64, [0.5], np.zeros((1, 2, 2), np.int32), [share])])
    assert [label.get_text() for label in figure.axes[0].texts] == [text, text]


def test_the_figure_of_tiles(reach):
    figures = pytest.importorskip("tests.support.figures")
    with style():
        figure = reach_figure(reach)
        figures.check_readable(figure)
        for axes, head in zip(figure.axes, reach.steepest_first, strict=True):
            [image] = axes.images
            assert (image.get_array() == reach.tiles(head)).all()
            title = f"head {head + 1}, slope {reach.slopes[head]:.3g}\nvisits {reach.shares[head]:.0%}"
            assert axes.get_title(loc="left") == title
        names = ["visited", "skipped: too far to matter", "hidden: later than the query"]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == names
        assert "key (normal queries and keys of 64 components)" in figures.texts_of(figure)


def test_the_figure_of_shares(reach):
    figures = pytest.importorskip("tests.support.figures")
    short = Reach.of(HEADS, 128)
    with style():
        figure = share_figure([short, reach])
        figures.check_readable(figure)
        [axes] = figure.axes
        shares = [[short.shares[head], reach.shares[head]] for head in reach.steepest_first]
        shares.append([sum(short.shares) / HEADS, sum(reach.shares) / HEADS])
        assert [text.get_text() for text in axes.texts] == [f"{share:.0%}" for row in shares for share in row]
        assert np.allclose(axes.images[0].get_array(), shares)
        assert [label.get_text() for label in axes.get_xticklabels()] == ["128", "1,024"]
        assert axes.get_yticklabels()[-1].get_text() == "all heads"
