"""Reads the HTML pages that the commands write."""

import json
from html.parser import HTMLParser

#: Attributes that make a browser load something. Links for readers (href of <a>) do not.
LOADING = ("src", "href", "data", "srcset", "poster", "action", "background")


class Page(HTMLParser):
    """The charts of a page, its text, and the addresses that it loads."""

    def __init__(self, path):
        super().__init__()
        self.charts, self.text, self.loaded, self.styles, self.policy = [], "", [], "", ""
        self._tag = None
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self._tag = "chart" if attrs.get("type") == "application/json" else tag
        self.loaded += [attrs[name] for name in LOADING if name in attrs and tag != "a"]
        if attrs.get("http-equiv") == "Content-Security-Policy":
            self.policy = attrs["content"]

    def handle_endtag(self, tag):
        self._tag = None

    def handle_data(self, data):
        if self._tag == "chart":
            self.charts.append(json.loads(data))
        elif self._tag == "style":
            self.styles += data
        elif self._tag != "script":
            self.text += f"{data}\n"

    def traces(self, chart):
        """Name -> points of a chart, given by its index."""
        return {trace["name"]: list(zip(trace["x"], trace["y"], strict=True)) for trace in self.charts[chart]["data"]}


def check_page(path):
    """The page loads nothing, and plotly knows all settings of its charts. Returns the page."""
    from plotly.graph_objects import Figure

    page = Page(path)
    assert page.loaded == []
    assert "url(" not in page.styles
    assert "@import" not in page.styles
    assert page.policy.split(";")[0] == "default-src 'none'"
    assert "http" not in page.policy
    assert page.charts
    for chart in page.charts:
        Figure(chart)
    return page
