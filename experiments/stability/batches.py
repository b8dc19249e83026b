"""The batches of a run. Equal seeds draw the same windows of the text in the same order, whatever the kind."""

from __future__ import annotations

import functools
import zlib

import numpy as np
import torch
from torch import Tensor

import seqwarm_kernels as sw
from seqwarm_kernels.demo.text import split, standard_library

from .settings import BATCH, CONSTANT, SHORT, Setting

VALIDATION_WINDOWS = 32
#: Folders of the standard library that are data rather than text.
_TABLES = ("encodings/", "pydoc_data/")


@functools.cache
def windows(seq_length: int) -> tuple[Tensor, Tensor]:
    """Windows of the sources of this Python's standard library, bytes as tokens: to train on, and held-out files.

    Only the half that compresses neither best nor worst. Tables and rows of spaces have a small loss: with few rows in
    a batch, many steps of a stable run would be above 1.2 times the smallest loss before.

    Returns:
        Two tensors (N, seq_length + 1) uint8.
    """
    files = [file for file in standard_library() if not file.name.startswith(_TABLES)]
    training, held_out = map(_typical, split(files), (seq_length, seq_length))
    return training, held_out


def _typical(text: bytes, seq_length: int) -> Tensor:
    cut = [text[start : start + seq_length + 1] for start in range(0, len(text) - seq_length, seq_length)]
    sizes = np.array([len(zlib.compress(window, 9)) for window in cut])
    low, high = np.quantile(sizes, (0.25, 0.75))
    kept = b"".join(window for window, size in zip(cut, sizes, strict=True) if low <= size <= high)
    return torch.frombuffer(bytearray(kept), dtype=torch.uint8).view(-1, seq_length + 1)


def validation_windows(setting: Setting) -> Tensor:
    """The same held-out windows for every run, evenly spread over the text. (N, seq_length + 1) int64."""
    held_out = windows(setting.seq_length)[1]
    return held_out[torch.linspace(0, len(held_out) - 1, VALIDATION_WINDOWS).long()].long()


class Batches:
    """Draws the batch of each step. Counts the tokens so far in the scheduler.

    Args:
        setting: The run.
        scheduler: Of sequence lengths, in tokens. Default: that of the run.
    """

    def __init__(self, setting: Setting, scheduler: sw.SequenceLengthScheduler | None = None) -> None:
        self._setting, self.scheduler = setting, scheduler or setting.scheduler()
        self._generator = torch.Generator().manual_seed(setting.seed)
        self._windows = windows(setting.seq_length)[0]

    def next(self) -> dict[str, Tensor]:
        """{"input_ids", "labels"}, both (B, S) int64."""
        setting, length = self._setting, self.scheduler.seq_length
        rows = setting.shape(length)[0] if setting.kind == BATCH else setting.rows
        drawn = torch.stack([self._draw() for _ in range(rows)]).long()
        batch: dict[str, Tensor] = {"input_ids": drawn[:, :-1].contiguous(), "labels": drawn[:, 1:].contiguous()}
        if setting.kind == SHORT:
            batch = sw.resize_batch(batch, setting.min_seq_length, mode="reshape")
        elif setting.kind == CONSTANT:
            batch = self.scheduler.resize(batch, mode="reshape")
        elif setting.kind != BATCH:
            batch = self.scheduler.resize(batch)
        self.scheduler.step(batch["input_ids"].numel())
        return batch

    def _draw(self) -> Tensor:
        return self._windows[int(torch.randint(len(self._windows), (), generator=self._generator))]
