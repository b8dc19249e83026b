"""The pages of the documentation that list models agree with apply_alibi and the installed transformers."""

import re

import pytest

from docs import model_types

from . import table


def test_the_table_of_families_is_up_to_date():
    assert table.PAGE.read_text() == table.page_with_table(), "run python -m tests.models.table"


def test_the_page_of_model_types_is_of_the_newest_transformers_that_is_tested():
    newest = (table.ROOT / "requirements-transformers-newest.txt").read_text()
    version = re.search(r"^transformers==([\d.]+)", newest, re.MULTILINE)[1]
    assert f"every type of transformers {version}" in " ".join(model_types.PAGE.read_text().split())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("starcoder2", "converted"), ("bart", "refused")],
)
def test_a_type_of_the_page(kind, expected):
    assert model_types.result(model_types.model_classes()[kind])[0] == expected
    section = model_types.PAGE.read_text().split(f"## {expected.capitalize()}\n")[1].split("\n## ")[0]
    assert f"`{kind}`" in section
