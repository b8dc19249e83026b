"""What docs/conf.py adds to Sphinx."""

import runpy
from types import SimpleNamespace

import pytest

pytest.importorskip("docutils")

from docutils import nodes

from .markdown import ROOT


@pytest.fixture(scope="module")
def conf():
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def test_a_picture_with_a_dark_file_changes_with_the_page(conf, tmp_path):
    (tmp_path / "both_dark.png").touch()
    app = SimpleNamespace(env=SimpleNamespace(docname="page", doc2path=lambda name: str(tmp_path / f"{name}.md")))
    page = nodes.section("", nodes.image(uri="both.png"), nodes.image(uri="light.png"))
    conf["_add_dark_pictures"](app, page)
    pictures = [(image["uri"], image["classes"]) for image in page.findall(nodes.image)]
    assert pictures == [("both.png", ["only-light"]), ("both_dark.png", ["only-dark"]), ("light.png", [])]


def test_absolute_values_in_docstrings(conf):
    lines = ["the distance |i − j|"]
    conf["_escape_bars"](None, "function", "name", None, None, lines)
    assert lines == [r"the distance \|i − j\|"]
