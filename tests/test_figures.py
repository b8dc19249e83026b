"""The style of figures: looks, axes, labels at lines, light and dark files."""

import io
import itertools
import sys

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.colors import to_rgb
from PIL import Image

from bench.alibi_attention import peers
from bench.common import figures
from bench.resize_batch import implementations
from seqwarm_kernels.utils.figures import ink, new_figure, page, style

from .support.figures import check_looks, check_readable, texts_of


@pytest.fixture(autouse=True)
def styled():
    with style():
        yield


def lightness(color):
    """The gray that a color becomes, from 0 to 1."""
    return sum(weight * part for weight, part in zip((0.299, 0.587, 0.114), to_rgb(color), strict=True))


def axes_of(width=6, height=3):
    figure = new_figure(width, height)
    return figure, figure.subplots()


def test_a_backend_does_not_change_a_look():
    assert figures.look_of("alibi_attention native, no skip") == figures.look_of("alibi_attention triton, no skip")
    assert figures.look_of("alibi_attention native, no skip") != figures.look_of("alibi_attention")


@pytest.mark.parametrize(
    "names",
    [
        [peer.name for peer in vars(peers).values() if isinstance(peer, peers.Peer)] + [peers.OURS, peers.OURS_NO_SKIP],
        [implementations.OURS, implementations.OURS_OUT, implementations.FOREACH, implementations.COMPILED],
        ["full length throughout", "sequence-length warmup", "half the batch, full length"],
        ["ring", "all-gather", "Ulysses", "halo"],
    ],
    ids=["attention", "resize_batch", "training", "many devices"],
)
def test_implementations_of_one_figure_differ_without_color(names):
    assert len({figures.look_of(name)["marker"] for name in names}) == len(names) >= 3


def test_colors_are_readable_on_both_pages():
    for name, look in figures.LOOKS.items():
        assert 0.25 < lightness(look["color"]) < 0.7, name


def test_labels_are_apart_and_in_order():
    positions = [0.5, 0.51, 0.1, 0.49, 0.9]
    spread = figures.spread_out(positions, 0.1)
    order = sorted(range(5), key=positions.__getitem__)
    assert order == sorted(range(5), key=spread.__getitem__)
    assert all(spread[b] - spread[a] >= 0.1 - 1e-9 for a, b in itertools.pairwise(order))
    assert (spread[2], spread[4]) == (0.1, 0.9)
    assert spread[0] == pytest.approx(0.5)


def test_labels_at_lines_do_not_overlap():
    figure, axes = axes_of()
    names = ["alibi_attention", "FlexAttention", "SDPA with bias mask", "eager with bias"]
    for index, name in enumerate(names):
        figures.plot(axes, name, [0, 1], [0, 1 + index / 1000])
    figures.label_lines([axes], bold="alibi_attention")
    check_readable(figure)
    check_looks(figure, names)
    labels = {text.get_text(): text for text in axes.texts}
    assert [labels[name].get_fontweight() for name in names] == ["bold", "normal", "normal", "normal"]
    assert [labels[name].xy for name in names] == [(1, 1 + index / 1000) for index in range(4)]
    assert labels[names[0]].arrow_patch.get_edgecolor()[:3] == to_rgb(figures.look_of(names[0])["color"])


def test_what_the_checks_of_figures_find():
    figure, axes = axes_of()
    axes.text(0.5, 0.5, "one")
    check_readable(figure)
    axes.text(0.51, 0.5, "other")
    with pytest.raises(AssertionError, match="'one' and 'other' overlap"):
        check_readable(figure)
    figure, axes = axes_of()
    figures.plot(axes, "FlexAttention", [0, 1], [0, 1], color="red")
    with pytest.raises(AssertionError, match="FlexAttention"):
        check_looks(figure, ["FlexAttention"])


def test_numbers_of_axes_are_written_out():
    for limits, ticks, shown in (
        ((0.5, 20), None, ["0.5", "1", "2", "5", "10", "20"]),
        ((64, 16384), [64, 1024, 16384], ["64", "1,024", "16,384"]),
    ):
        figure, axes = axes_of()
        axes.plot(limits, [0, 1])
        axes.set_yticks([])
        figures.log_axis(axes.xaxis, ticks)
        assert texts_of(figure) == shown


def test_a_file_for_light_and_one_for_dark_pages(tmp_path):
    contrasts = []

    def draw():
        contrasts.append(lightness(page()) - lightness(ink()))
        figure, axes = axes_of()
        figures.plot(axes, "FlexAttention", [0, 1], [0, 1])
        return figure

    assert figures.save_both(draw, tmp_path / "new" / "name.png") == tmp_path / "new" / "name.png"
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["name.png", "name_dark.png"]
    assert contrasts[0] > 0.7 > -0.7 > contrasts[1]
    for stem, is_dark in (("name", False), ("name_dark", True)):
        image = Image.open(tmp_path / "new" / f"{stem}.png").convert("RGB")
        assert image.size == (900, 450)
        assert (sum(image.getpixel((0, 0))) < 100) == is_dark
    assert Image.open(io.BytesIO(figures.png(draw))).mode == "P"


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r'pip install "seqwarm_kernels\[demo\]"'), style():
        pass
