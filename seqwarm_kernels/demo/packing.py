"""Paragraphs of the text, packed: every batch is full of whole ones, and none is padded."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..data import BatchPlanner, LengthBatchSampler, PackedCollator, PieceDataset
from ..ops.resize_batch.schema import IGNORED_LABEL
from ..schedule.scheduler import SequenceLengthScheduler
from .batches import Batch
from .settings import Settings

#: A paragraph ends with its empty lines, or with a file.
_END = re.compile(rb"\n\s*\n|\0")


class Paragraphs(Dataset[Tensor]):
    """Of a text (N,) uint8: every byte belongs to one."""

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
    """Batches of a run, one after another without an end; paragraphs longer than the present length come in pieces.

    The planner follows the schedule's curve by the tokens that it hands out, as the trainer counts them.
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
        """As `batches.Batch`, and where sequences begin; the last token of a sequence has no next byte to learn."""
        batch: Any = self._collate(self._pieces.__getitems__(next(self._batches)))
        next_bytes = torch.cat([batch["labels"][:, 1:], torch.full((1, 1), IGNORED_LABEL)], 1)
        return {"input_ids": batch["input_ids"], "labels": next_bytes, "cu_seqlens": batch["cu_seq_lens_q"]}

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._batches = iter(self._sampler)
