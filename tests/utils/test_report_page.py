"""The page that the reports of demo, tune and padding share."""

import math
import sys

import pytest

from seqwarm_kernels.utils import report_page

from ..support.pages import Page, check_page

pytest.importorskip("plotly")

AXIS = {"title": "x"}


def write(path, *parts):
    path.write_bytes(report_page.page("A <title>", parts))
    return path


def test_charts_hold_their_numbers_as_text(tmp_path):
    line = report_page.line("a </script> name", [0, 1, 2], [0.1, math.inf, math.nan], color="red", dash="dot")
    page = check_page(write(tmp_path / "page.html", report_page.chart("Chart", [line], x=AXIS, y=AXIS, note="A note")))
    [trace] = page.charts[0]["data"]
    assert (trace["name"], trace["x"], trace["y"]) == ("a </script> name", [0, 1, 2], [0.1, None, None])
    assert trace["line"] == {"color": "red", "dash": "dot", "shape": "linear"}
    assert page.charts[0]["layout"]["xaxis"]["title"]["text"] == "x"
    assert "A note" in page.text


def test_text_is_escaped(tmp_path):
    parts = [report_page.text("<b>"), report_page.table("<i>", ("<u>",), [("<s>",)]), report_page.items(["<p>"])]
    content = write(tmp_path / "page.html", *parts, report_page.how_it_was_made("a <b>", [])).read_text()
    for tag in ("&lt;b&gt;", "&lt;i&gt;", "&lt;u&gt;", "&lt;s&gt;", "&lt;p&gt;", "A &lt;title&gt;", "a &lt;b&gt;"):
        assert tag in content


def test_how_it_was_made(tmp_path):
    page = Page(write(tmp_path / "page.html", report_page.how_it_was_made("seqwarm demo", [("seed", "7")])))
    assert "command\nseqwarm demo\n" in page.text
    assert "seed\n7\n" in page.text
    assert report_page.versions() in page.text


def test_the_script_is_part_of_the_page(tmp_path):
    from plotly.offline import get_plotlyjs

    assert get_plotlyjs() in write(tmp_path / "page.html").read_text()


def test_a_resource_would_be_seen(tmp_path):
    page = Page(write(tmp_path / "page.html", '<a href="https://a"></a><img src="https://b"><link href="//c">'))
    assert page.loaded == ["https://b", "//c"]


def test_plotly_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(ImportError, match=r'pip install "seqwarm_kernels\[demo\]"'):
        report_page.page("title", [])
