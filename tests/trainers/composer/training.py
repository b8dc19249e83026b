"""A tiny GPT-2 in Composer's trainer, on sequences that it can learn, with a record of its batches and losses."""

import torch
from composer import Callback, Trainer
from composer.loggers import InMemoryLogger
from composer.models import HuggingFaceModel
from torch.utils.data import DataLoader, IterableDataset

from ...support import huggingface as support

VOCABULARY = 16
LENGTH = 32
BATCH_SIZE = 4


def tiny_gpt2(seed=0, dropout=0.0):
    model = support.tiny_gpt2(VOCABULARY, 4 * LENGTH, seed=seed, width=32, dropout=dropout)
    return HuggingFaceModel(model, use_logits=True)


def counting_rows(count, length=LENGTH):
    """Returns rows that count upwards, each from its own first token and by its own step."""
    starts, steps = torch.arange(count)[:, None], 1 + torch.arange(count)[:, None] % 3
    return (starts + steps * torch.arange(length)) % VOCABULARY


def batches(count, length=LENGTH):
    """A sized dataloader of `count` batches."""
    examples = [{"input_ids": row, "labels": row} for row in counting_rows(count * BATCH_SIZE, length)]
    return DataLoader(examples, batch_size=BATCH_SIZE)


class Stream(IterableDataset):
    """An endless stream of rows, without a length."""

    def __iter__(self):
        while True:
            for row in counting_rows(4 * BATCH_SIZE):
                yield {"input_ids": row, "labels": row}


class Seen(Callback):
    """Collects the shape of every batch that the model gets, and the losses."""

    def __init__(self):
        self.shapes, self.eval_shapes, self.losses = [], [], []

    @property
    def lengths(self):
        return [length for _, length in self.shapes]

    def batch_start(self, state, logger):
        self.shapes.append(tuple(state.batch["input_ids"].shape))

    def batch_end(self, state, logger):
        self.losses.append(state.total_loss_dict["loss/train/total"])

    def eval_batch_start(self, state, logger):
        self.eval_shapes.append(tuple(state.batch["input_ids"].shape))


class Run:
    """A trainer that is ready to fit."""

    def __init__(self, max_duration, *algorithms, model=None, dataloader=None, callbacks=(), **options):
        self.model = tiny_gpt2() if model is None else model
        self.seen, self.logs = Seen(), InMemoryLogger()
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        self.trainer = Trainer(
            model=self.model,
            train_dataloader=batches(10) if dataloader is None else dataloader,
            max_duration=max_duration,
            algorithms=list(algorithms),
            optimizers=optimizer,
            callbacks=[self.seen, *callbacks],
            loggers=self.logs,
            device="cpu",
            seed=0,
            progress_bar=False,
            **options,
        )

    def fit(self):
        self.trainer.fit()
        return self

    def metric(self, name):
        return [value for _, value in self.logs.data[name]]
