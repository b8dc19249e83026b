"""The generated tables of the pages are those of the records."""

import re

import pytest

from bench import page

PAGES = pytest.mark.parametrize(("path", "tables"), page.PAGES.items(), ids=lambda each: getattr(each, "stem", ""))


@PAGES
def test_the_page_is_up_to_date(path, tables):
    text = path.read_text()
    assert page.filled(text, tables) == text, "run python -m bench page"


@PAGES
def test_every_marker_has_a_table_and_every_table_a_marker(path, tables):
    assert re.findall(r"<!-- (.*): begin -->", path.read_text()) == list(tables)


@PAGES
def test_a_table_that_is_not_up_to_date_would_be_seen(path, tables):
    text = path.read_text()
    changed = re.sub(r"(begin -->\n\n\|.*\n\|.*\n\| )", r"\1another ", text)
    assert changed != text
    assert page.filled(changed, tables) == text
