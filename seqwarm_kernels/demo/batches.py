"""Batches of text: windows for training and validation, and packed paragraphs without padding."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data import BatchPlanner, LengthBatchSampler, PackedCollator, PieceDataset
from ..ops.resize_batch.schema import IGNORED_LABEL
from ..schedule.scheduler import SequenceLengthScheduler
from .settings import Settings

#: {"input_ids": (B, S) int64, "labels": (B, S) int64}: the label of a token is the next byte.
Batch = dict[str, Tensor]

#: A paragraph ends with its empty lines, or at the end of a file.
_END = re.compile(rb"\n\s*\n|\0")


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


class Paragraphs(Dataset[Tensor]):
    """The paragraphs of a text (N,) uint8. Every byte belongs to one paragraph."""

    def __init__(self, text: Tensor) -> None:
        ends = [match.end() for match in _END.finditer(text.numpy().tobytes())]
        self.bounds = sorted({0, *ends, len(text)})
        self._text = text

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def __getitem__(self, index: int) -> Tensor:
        return self._text[self.bounds[index] : self.bounds[index + 1]].long()

    def lengths(self) -> list[int]:
        return [end - start for start, end in zip(self.bounds, self.bounds[1:], strict=False)]


class PackedText:
    """Endless packed batches of paragraphs. Paragraphs longer than the current length are split into pieces.

    The planner advances the schedule by the tokens that it yields, and the trainer counts the same tokens.
    """

    def __init__(self, text: Tensor, settings: Settings, scheduler: SequenceLengthScheduler) -> None:
        paragraphs = Paragraphs(text)
        budget = settings.batch_size * settings.seq_length
        planner = BatchPlanner(budget, max_length=scheduler, too_long="split", warmup="cut", packed=True)
        self._sampler = LengthBatchSampler(paragraphs.lengths(), planner, seed=settings.seed, infinite=True)
        self._pieces = PieceDataset(paragraphs)
        self._collate = PackedCollator(max_tokens=budget)
        self._batches = iter(self._sampler)

    def next_batch(self) -> Batch:
        """Returns a `Batch` of one row, with the boundaries of its sequences in `cu_seqlens`.

        The last token of a sequence has no next byte, and its label is ignored.
        """
        batch: Any = self._collate(self._pieces.__getitems__(next(self._batches)))
        next_bytes = torch.cat([batch["labels"][:, 1:], torch.full((1, 1), IGNORED_LABEL)], 1)
        return {"input_ids": batch["input_ids"], "labels": next_bytes, "cu_seqlens": batch["cu_seq_lens_q"]}

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._batches = iter(self._sampler)
