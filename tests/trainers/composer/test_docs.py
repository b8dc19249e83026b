"""The code of the pages that need Composer runs, and prints what the page says; so does the example."""

import math
import runpy
import sys

import pytest
import torch

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from torch.utils.data import DataLoader

from seqwarm_kernels.trainers.composer import SeqLengthWarmup

from ...docs import markdown
from ...docs.names import dataset
from ...docs.test_code_blocks import WITH_COMPOSER
from ..test_constant_tokens import run
from .training import VOCABULARY, counting_rows, tiny_gpt2


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


def test_tokens_and_learning_rates():
    """The recipe for constant tokens."""
    import composer

    blocks = markdown.python_blocks((markdown.ROOT / WITH_COMPOSER[0]).read_text())
    [code] = [block.code for block in blocks if "truncate=False" in block.code]
    data = [{"input_ids": row, "labels": row} for row in counting_rows(32, 64)]
    model = tiny_gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    names = {
        "SeqLengthWarmup": SeqLengthWarmup,
        "Trainer": composer.Trainer,
        "model": model,
        "loader": DataLoader(data, batch_size=8),
        "optimizer": optimizer,
    }
    shapes, rates = run(code, names, VOCABULARY)
    lengths = [8, 48, 64, 64]  # 8 + 8 * floor(56 n / 1.2 / 8)
    assert shapes == [(8 * 64 // length, length) for length in lengths]
    before = [0, 0, 1, 2]  # Composer computes a rate before it counts the batch
    cosine = [(1 + math.cos(math.pi * step / 4)) / 2 for step in before]
    factors = [(64 / lengths[step]) ** 0.5 for step in before]
    assert rates == pytest.approx([0.5 * c * factor for c, factor in zip(cosine, factors, strict=True)])


def test_train_composer(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train_composer.py", "--steps", "12"])
    runpy.run_path(str(markdown.ROOT / "examples" / "train_composer.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    lengths = [int(words[3]) for words in lines]
    assert lengths[0] < lengths[-1] == 128
    assert float(lines[-1][5]) < float(lines[0][5])
