"""docs/guides/model_types.md agrees with the installed transformers, in a few types."""

import re

import pytest

from .model_types import PAGE, model_classes, result
from .table import ROOT


def test_the_page_is_of_the_newest_transformers_that_is_tested():
    newest = (ROOT / "requirements-transformers-newest.txt").read_text()
    version = re.search(r"^transformers==([\d.]+)", newest, re.MULTILINE)[1]
    assert f"every type of transformers {version}" in " ".join(PAGE.read_text().split())


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("gpt2", "converted"), ("starcoder2", "converted"), ("bart", "refused"), ("gemma2", "refused")],
)
def test_a_type_of_the_page(kind, expected):
    assert result(model_classes()[kind])[0] == expected
    section = PAGE.read_text().split(f"## {expected.capitalize()}\n")[1].split("\n## ")[0]
    assert f"`{kind}`" in section
