"""Windows of text for training and validation."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

#: {"input_ids": (B, S) int64, "labels": (B, S) int64}: the label of a token is the next byte.
Batch = dict[str, Tensor]


def training_batch(text: Tensor, seed: int, step: int, batch_size: int, seq_length: int) -> Batch:
    """Returns windows at random positions, which depend only on (seed, step): a resumed run gets the same windows."""
    digest = hashlib.sha256(f"{seed} {step}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    starts = torch.randint(len(text) - seq_length, (batch_size,), generator=generator)
    return _windows(text, starts, seq_length)


def validation_set(text: Tensor, count: int, seq_length: int) -> Batch:
    """Returns evenly spaced windows: `count` of them, or fewer if they would overlap."""
    available = (len(text) - 1) // seq_length
    last_start = len(text) - 1 - seq_length
    starts = torch.linspace(0, last_start, min(count, available), dtype=torch.float64).long()
    return _windows(text, starts, seq_length)


def _windows(text: Tensor, starts: Tensor, seq_length: int) -> Batch:
    tokens = text[starts[:, None] + torch.arange(seq_length + 1)].long()
    return {"input_ids": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}
