"""The style of figures: looks, axes, labels at lines, light and dark files."""

import io
import sys

import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.colors import to_rgb
from PIL import Image

from bench.common import figures
from seqwarm_kernels.utils.figures import ink, new_figure, page, style

from .support.figures import check_looks, check_readable


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
