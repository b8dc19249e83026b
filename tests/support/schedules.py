"""Schedules in tests, and models that they are attached to."""

import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler

WORDS, WIDTH = 11, 8


class Identity(nn.Module):
    def forward(self, input_ids):
        return input_ids


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids, labels=None, attention_mask=None, num_items_in_batch=None):
        logits = self.head(self.embedding(input_ids))
        if labels is None:
            return logits
        targets = labels[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, reduction="sum")
        return loss / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def scheduler():
    return SequenceLengthScheduler(4, 16, duration=3, step_size=4)


def tokens(rows=2, length=16):
    return torch.randint(WORDS, (rows, length))


def compiled_in_place(model):
    model.compile(backend="eager")
    return model
