"""The Python code of the pages that need Composer runs, and prints what the page says."""

import pytest
import torch

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from torch.utils.data import DataLoader

from ...docs import markdown
from ...docs.names import dataset
from ...docs.test_code_blocks import WITH_COMPOSER
from .training import tiny_gpt2


@pytest.mark.parametrize("page", WITH_COMPOSER)
def test_code(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{name: row % 16 for name, row in item.items()} for item in dataset(length=64)]
    loader = DataLoader(rows, batch_size=2)
    model = tiny_gpt2()
    names = {"model": model, "loader": loader, "make_loader": lambda: loader, "max_duration": "1ep"}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    for printed, expected in markdown.run(page, names, monkeypatch):
        assert printed == expected
