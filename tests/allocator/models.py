"""Models that the tests warm up."""

import random
from collections import UserList

import numpy
import torch
from torch import nn


class Tied(nn.Module):
    """Embedding first, dropout, batch norm buffers, tied weights, a frozen part, a buffer created in forward."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.batch_norm = nn.BatchNorm1d(16)
        self.dropout = nn.Dropout(0.5)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("overlapping", torch.ones(1).expand(3))
        self.fail_at = fail_at
        self.lengths = UserList()  # not restored, as a list would be

    def forward(self, input_ids):
        self.calls += 1
        self.lengths.append(input_ids.shape[1])
        self.register_buffer("cache", torch.zeros(input_ids.shape[1]))
        hidden = self.batch_norm(self.embedding(input_ids).transpose(1, 2)).transpose(1, 2)
        if self.fail_at is not None and len(self.lengths) >= self.fail_at:
            raise RuntimeError("interrupted")
        random.random()
        numpy.random.rand()
        return self.head(self.dropout(self.frozen(hidden)))


class Recorder(nn.Module):
    """Records its inputs; `forward` takes a batch in one of several ways."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = UserList()
        self.forward = forward.__get__(self)
