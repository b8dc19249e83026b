"""Lightning on two ranks: padded and packed batches, truncated and reshaped, train on the tokens that the log says."""

import itertools
import json
import os

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

import lightning.pytorch as lightning

from seqwarm_kernels.trainers.lightning import SequenceLengthWarmup

from ..support.ranks import leave_group, run_ranks
from .test_lightning import Records
from .test_packed import COLLATORS, LEARNING_RATE, LENGTH, SEQUENCES, count_tokens, model, schedule, sequences

STEPS = 4
LENGTHS = [8, 16, 24, 32]


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = model()

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def padded(items):
    """Rows of other lengths, padded on the right. All labels are kept."""
    rows = [torch.tensor(item["input_ids"])[: LENGTH - 3 * index] for index, item in enumerate(items)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows])
    return {"input_ids": ids, "labels": ids, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).long()}


class Data(lightning.LightningDataModule):
    """Each rank has its own part of every step's sequences."""

    def __init__(self, collator):
        super().__init__()
        self.collator = collator

    def train_dataloader(self):
        size = SEQUENCES // self.trainer.world_size
        first = self.trainer.global_rank * size
        order = [step * SEQUENCES + first + index for step in range(STEPS) for index in range(size)]
        return DataLoader(sequences(), size, sampler=order, collate_fn=self.collator)


def valid_tokens(model):
    """Returns a function that lists the number of tokens in each call of the model, without padding."""
    seen, all_tokens = [], count_tokens(model)

    def count(module, args, kwargs):
        mask = kwargs.get("attention_mask")
        seen.append(None if mask is None else int(mask.sum()))

    model.register_forward_pre_hook(count, with_kwargs=True)
    return lambda: [each if mask is None else mask for each, mask in zip(all_tokens, seen, strict=True)]


def trained(collator, method, **settings):
    """The tokens of each step that this rank's model got, and the count of all ranks in the logs."""
    module, records = Module(), Records()
    seen = valid_tokens(module.model)
    warmup = SequenceLengthWarmup(schedule(), **method)
    names = ("enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, log_every_n_steps=1, callbacks=[warmup], logger=records,
        use_distributed_sampler=False, **dict.fromkeys(names, False), **settings,
    )  # fmt: skip
    trainer.fit(module, Data(collator))
    logged = [record["train_tokens"] for record in records.records if "train_tokens" in record]
    return {"seen": seen(), "logged": logged}


def one_of_two(rank, port, folder):
    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found = [trained(collator, method, devices=2, strategy="ddp") for _, collator, method in CASES]
    (folder / f"{rank}.json").write_text(json.dumps(found))
    leave_group()


METHODS = [{}, {"mode": "reshape", "remainder": "pad"}]
CASES = [
    (kind, collator, method)
    for (kind, collator), method in itertools.product([("packed", COLLATORS[1]), ("padded", padded)], METHODS)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Lightning's hints on workers
def test_two_ranks_train_on_what_the_log_says(tmp_path):
    run_ranks(one_of_two, tmp_path)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    sizes = torch.tensor([LENGTH - 3 * index for index in range(SEQUENCES // 2)])
    for (kind, _, method), *found in zip(CASES, *ranks, strict=True):
        of_rank = sizes if kind == "padded" else torch.full((SEQUENCES // 2,), LENGTH)
        kept = [int((of_rank if method else of_rank.clamp(max=length)).sum()) for length in LENGTHS]
        for rank in found:
            assert rank["seen"] == kept
            assert rank["logged"] == (2 * torch.tensor(kept)).cumsum(0).tolist()
