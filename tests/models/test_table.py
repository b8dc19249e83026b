"""The documentation's table of families agrees with apply_alibi."""

from .table import PAGE, page_with_table


def test_the_table_of_families_is_up_to_date():
    assert PAGE.read_text() == page_with_table(), "run python -m tests.models.table"
