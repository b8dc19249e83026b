"""The Python code of README and docs runs, and prints what the page says."""

import pytest
import torch

from . import markdown
from .names import NAMES

WITH_COMPOSER = ("docs/guides/composer.md", "docs/help/from_composer.md")  # tests/trainers/composer runs these
ON_TWO_RANKS = "docs/guides/batches_in_trainers.md"  # tests/trainers/test_loaders.py
COUNTED = "docs/guides/constant_tokens.md"  # tests/trainers/test_constant_tokens.py
LONG = ("docs/guides/tuning.md", "docs/help/from_flexattention.md")  # these compile, or draw
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


def test_blocks_are_found_with_their_output_and_their_reason():
    text = "```python\nprint(1)\n```\n\n```text\n1\n```\n<!-- not run: needs a GPU -->\n```python\nprint(2)\n```\n"
    first, second = markdown.python_blocks(text)
    assert (first.code, first.line, first.not_run, first.printed) == ("print(1)\n", 2, None, "1\n")
    assert (second.code, second.line, second.not_run, second.printed) == ("print(2)\n", 10, "needs a GPU", None)


def test_calls_in_tables_are_found():
    text = "| f | seqwarm_kernels |\n|---|---|\n| `f(x)` | `g(x)`, faster |\n| `f()` | `g()` |\n"
    assert list(markdown.calls_in_tables(text)) == ["g(x)", "g()"]
    assert len(list(markdown.calls_in_tables((markdown.ROOT / "docs/help/from_composer.md").read_text()))) == 8
