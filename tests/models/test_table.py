"""The documentation's table of families is what surgery does."""

from .table import PAGE, page_with_table


def test_the_table_of_families_is_true():
    assert PAGE.read_text() == page_with_table(), "run python -m tests.models.table"
