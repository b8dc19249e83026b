"""Cuts batches, and then takes this rank's part of each, as a model with `ContextParallel` needs."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from ..parallel.context_batches import ContextBatches
from ..schedule.attachment import Resizer


class PartResizer:
    """A `Resizer` that returns parts. The facts it returns are those of whole batches.

    Attributes:
        batches: what takes the parts, and lets the model know.
        by: what the last part has: whole "rows", or "tokens" of all rows.
    """

    def __init__(self, resizer: Resizer, model: nn.Module, shift_labels: bool, keys: Collection[str] | None) -> None:
        self._resizer = resizer
        self.batches = ContextBatches(model, shift_labels=shift_labels, keys=keys)
        self.by = "tokens"

    @property
    def seq_length(self) -> int:
        return self._resizer.seq_length

    def resize(self, batch: Any, **options: Any) -> Any:
        resized, info = self._resizer.resize(batch, **options)
        part, self.by = self.batches.take(resized)
        return part, info
