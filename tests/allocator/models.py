"""Models that record the calls of warmup_allocator."""

from collections import UserList

import torch
from torch import nn


class Words(nn.Module):
    """Embedding first, dropout, tied weights. Records the lengths that it sees."""

    def __init__(self):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(50, 16), nn.Dropout(0.5)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.lengths = UserList()  # not restored, as a list would be

    def forward(self, input_ids):
        self.lengths.append(input_ids.shape[1])
        return self.head(self.dropout(self.embedding(input_ids)))


class Recorder(nn.Module):
    """Records its inputs; `forward` takes a batch in one of several ways."""

    def __init__(self, forward):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = UserList()
        self.forward = forward.__get__(self)
