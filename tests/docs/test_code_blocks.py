"""The Python code of README and docs runs, and prints what the page says."""

import pytest
import torch

from . import markdown
from .names import NAMES

WITH_COMPOSER = ("docs/guides/composer.md", "docs/help/from_composer.md")  # tests/trainers/composer runs these
ON_TWO_RANKS = "docs/guides/batches_in_trainers.md"  # tests/trainers/test_loaders.py
COUNTED = "docs/guides/constant_tokens.md"  # tests/trainers/test_constant_tokens.py
LONG = ("README.md", "docs/guides/huggingface.md", "docs/guides/tuning.md", "docs/help/from_flexattention.md")
RUN_HERE = [
    page
    for page in markdown.PAGES
    if page not in (*WITH_COMPOSER, ON_TWO_RANKS, COUNTED)
    and list(markdown.python_blocks((markdown.ROOT / page).read_text()))
]


@pytest.mark.parametrize("page", [pytest.param(page, marks=[pytest.mark.slow] * (page in LONG)) for page in RUN_HERE])
def test_code(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = NAMES.get(page, dict)()
    try:
        for printed, expected in markdown.run(page, names, monkeypatch):
            assert printed == expected
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def test_names_are_of_pages_with_code():
    assert set(NAMES) <= set(RUN_HERE)
