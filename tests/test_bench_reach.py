"""Figures of what heads visit."""

import numpy as np
import pytest
import torch

from bench.alibi_attention.reach import HIDDEN, SKIPPED, VISITED, Reach, random_reach, shares_figure, tiles_figure
from seqwarm_kernels import attended_share
from seqwarm_kernels.ops import backends
from seqwarm_kernels.utils.figures import style

figures = pytest.importorskip("tests.support.figures")


def made(visited, visible, length=128):
    return Reach(length, 64, 0.5 ** torch.arange(1.0, len(visited) + 1), np.array(visited), np.array(visible))


def test_visited_tiles_of_known_ranges():
    visible = [[0, 32], [0, 64], [0, 96], [0, 128]]
    tiles = made([[[0, 32], [0, 64], [32, 96], [70, 128]]], visible).tiles(0)
    h, s, v = HIDDEN, SKIPPED, VISITED
    assert tiles.tolist() == [[v, h, h, h], [v, v, h, h], [s, v, v, h], [s, s, v, v]]


def test_the_figure_of_tiles():
    if backends.choose("alibi_attention", "cpu", None, torch.float32) == "reference":
        pytest.skip("the native kernels are not built")
    reach = random_reach(3, 1024)
    query, key = torch.randn(2, 1, 3, 1024, 64, generator=torch.Generator().manual_seed(0))
    assert reach.shares == pytest.approx(attended_share(query, key, key)[0].numpy())
    assert reach.steepest_first() == [2, 0, 1]  # the third slope lies between those of two heads
    with style():
        figure = tiles_figure(reach)
        figures.check_readable(figure)
    for axes, head in zip(figure.axes, reach.steepest_first(), strict=False):
        [image] = axes.images
        assert (image.get_array() == reach.tiles(head)).all()
        share = reach.shares[head]
        assert axes.get_title(loc="left") == f"head {head}, slope {reach.slopes[head]:.3g}\nvisits {share:.0%}"


def test_the_figure_of_shares():
    """A share is not rounded to all."""
    for keys, text in ((20_000, "100%"), (19_940, ">99%"), (19_880, "99%"), (0, "0%")):
        with style():
            figure = shares_figure([made([[[0, keys]]], [[0, 20_000]])])
            figures.check_readable(figure)
        assert [label.get_text() for label in figure.axes[0].texts] == [text, text]
