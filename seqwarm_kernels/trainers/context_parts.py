"""Cuts batches, and then takes this rank's part of each, as a model with `ContextParallel` needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..schedule.attachment import Resizer


class PartResizer:
    """A `Resizer` that returns parts. The facts it returns are those of whole batches."""

    def __init__(self, resizer: Resizer, shard: Callable[[Any], Any]) -> None:
        self._resizer, self._shard = resizer, shard

    @property
    def seq_length(self) -> int:
        return self._resizer.seq_length

    def resize(self, batch: Any, **options: Any) -> Any:
        resized, info = self._resizer.resize(batch, **options)
        return self._shard(resized), info
