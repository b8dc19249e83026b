"""The tables of the page on benchmarks are those of the records."""

import re

from bench import page


def test_the_page_is_up_to_date():
    text = page.PAGE.read_text()
    assert page.filled(text) == text, "run python -m bench page"


def test_every_marker_has_a_table_and_every_table_a_marker():
    text = page.PAGE.read_text()
    assert re.findall(r"<!-- (.*): begin -->", text) == list(page.TABLES)


def test_a_table_that_is_not_up_to_date_would_be_seen():
    text = page.PAGE.read_text()
    assert page.filled(text.replace("| 1,024 | float32 |", "| 1,024 | float32 | 1 ms |")) == text
