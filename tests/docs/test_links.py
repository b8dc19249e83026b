"""Relative links of Markdown pages lead to files and headings that exist."""

import pytest

from .markdown import PAGES, ROOT, anchors, links, prose


def broken_links(page, text):
    for link in links(text):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text())):
            yield link


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    text = (ROOT / page).read_text()
    assert list(broken_links(page, text)) == []
    comments = [line for line in prose(text).splitlines() if line.lstrip().startswith("%")]
    assert comments == [], "MyST drops lines that begin with a percent sign, without a warning"
