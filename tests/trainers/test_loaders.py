"""The recipes of docs/guides/batches_in_trainers.md on two ranks, and trainers that would shard a sampler again."""

import json
import multiprocessing
import os
from types import SimpleNamespace

import pytest
import torch
from torch import distributed, nn
from torch.utils.data import DataLoader

pytest.importorskip("accelerate")
pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

from accelerate.data_loader import prepare_data_loader

from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    SequenceSource,
    write_chunks,
)

from ..docs import markdown
from ..docs.test_code_blocks import ON_TWO_RANKS
from ..support.ranks import join_group, run_ranks

#: 1,000 items, six batches padded or packed. The tokens of item i are i + 1, so that padding, 0, is no item.
LENGTHS = [35 + 37 * i % 101 for i in range(1000)]


class CountingModel(nn.Module):
    """Counts the tokens of each item."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.counts = torch.zeros(len(LENGTHS) + 1, dtype=torch.int64)

    def forward(self, input_ids, **others):
        self.counts += torch.bincount(input_ids.flatten(), minlength=len(self.counts))
        return {"loss": self.weight * input_ids.float().mean()}


def write_texts(folder):
    texts = (f"{i + 1} " * length for i, length in enumerate(LENGTHS))
    write_chunks(texts, folder / "chunks", length_fn=lambda text: len(text.split()))


def data_names():
    """What the functions that make loaders take for granted, beside the folder of `write_texts`."""
    return {
        "dataset": [{"input_ids": [i + 1] * length} for i, length in enumerate(LENGTHS)],
        "tokenizer": lambda text: SimpleNamespace(input_ids=list(map(int, text.split()))),
    }


def trainer_names(model):
    """What the trainings take for granted."""
    import lightning.pytorch as pl
    from transformers import TrainingArguments

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = model

        def training_step(self, batch):
            return self.model(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1e-6)

    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=1e-6),
        "arguments": TrainingArguments(
            "out",
            max_steps=3,
            use_cpu=True,
            ddp_backend="gloo",
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        "module": Module(),
        "other_arguments": {"accelerator": "cpu", "devices": 2, "strategy": "ddp", **dict.fromkeys(off, False)},
    }


def blocks():
    """The page's code: functions that make loaders, and trainings."""
    code = [block.code for block in markdown.python_blocks((markdown.ROOT / ON_TWO_RANKS).read_text())]
    makers = [block for block in code if "def make_loader" in block]
    return makers, [block for block in code if block not in makers]


def one_of_two(rank, port, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    multiprocessing.set_start_method("fork", force=True)  # the functions of a page are in no module
    early = sampler(None)
    join_group(rank, port)
    with pytest.raises(ValueError, match="from before it was initialized: make the LengthBatchSampler afterwards"):
        next(iter(early))
    counts = []
    makers, trainings = blocks()
    for maker in makers:
        for training in trainings:
            model = CountingModel()
            namespace = {**data_names(), **trainer_names(model)}
            exec(maker, namespace)
            exec(training, namespace)
            counts.append(model.counts.tolist())
    (folder / f"{rank}.json").write_text(json.dumps(counts))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_train_on_every_item_once(tmp_path):
    write_texts(tmp_path)
    run_ranks(one_of_two, tmp_path)
    by_rank = torch.tensor([json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)])
    assert by_rank.shape[1] == 3 * 3
    for counts in by_rank.unbind(1):
        assert counts[:, 1:].any(dim=1).all()
        assert counts.sum(0)[1:].tolist() == LENGTHS


def sampler(world_size):
    ranks = {} if world_size is None else {"rank": 0, "world_size": world_size}
    return LengthBatchSampler(LENGTHS, BatchPlanner(512), **ranks)


def stream(world_size):
    return LengthBatchStream(
        SequenceSource(range(1000)), BatchPlanner(512), length=LENGTHS.__getitem__, rank=0, world_size=world_size
    )


class TestShardedAgain:
    @pytest.mark.parametrize("make", [sampler, stream])
    @pytest.mark.parametrize("even_batches", [False, True])
    def test_accelerate(self, make, even_batches):
        loader = DataLoader(ItemDataset(), batch_sampler=make(2))
        with pytest.raises(ValueError, match=r"of 2 ranks must not be sharded again: .* pass ResumableLoader"):
            prepare_data_loader(loader, num_processes=2, process_index=0, even_batches=even_batches)

    def test_lightning(self):
        from lightning.pytorch.utilities.data import _update_dataloader

        loader = DataLoader(ItemDataset(), batch_sampler=sampler(2))
        with pytest.raises(ValueError, match="of 2 ranks must not be sharded again"):
            _update_dataloader(loader, loader.sampler)

    def test_one_rank_is_not_sharded(self):
        loader = DataLoader(ItemDataset(), batch_sampler=sampler(1), collate_fn=list)
        assert sorted(item for batch in prepare_data_loader(loader) for item in batch) == list(range(1000))
        assert not hasattr(sampler(1), "batch_size")
