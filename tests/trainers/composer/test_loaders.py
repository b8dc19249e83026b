"""Composer's recipe for batches by length on two ranks."""

import json
import multiprocessing
import os

import pytest
import torch

from . import conftest  # noqa: F401  # each process imports Composer this way

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer.models import ComposerModel

from ...docs import markdown
from ...support.ranks import leave_group, run_ranks, set_environment
from ..test_loaders import LENGTHS, CountingModel, blocks, data_names, write_texts

(RECIPE,) = (
    block.code
    for block in markdown.python_blocks((markdown.ROOT / "docs/guides/composer.md").read_text())
    if "make_loader" in block.code
)


class Counting(ComposerModel):
    def __init__(self):
        super().__init__()
        self.model = CountingModel()

    def forward(self, batch):
        return self.model(**batch)

    def loss(self, outputs, batch):
        return outputs["loss"]


def one_of_two(rank, port, folder):
    set_environment(rank, port)
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # the functions of a page are in no module
    counts = []
    for maker in blocks()[0]:
        model = Counting()
        namespace = {**data_names(), "model": model, "max_duration": "3ba"}
        exec(maker, namespace)
        exec(RECIPE, namespace)
        counts.append(model.model.counts.tolist())
    (folder / f"{rank}.json").write_text(json.dumps(counts))
    leave_group()


def test_two_ranks_train_on_every_item_once(tmp_path):
    write_texts(tmp_path)
    run_ranks(one_of_two, tmp_path)
    by_rank = torch.tensor([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)])
    for counts in by_rank.unbind(1):
        assert counts[:, 1:].any(dim=1).all()
        assert counts.sum(0)[1:].tolist() == LENGTHS
