"""The batches of a training with `ContextParallel`: whole rows for each rank where that is possible, else tokens."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from ..resizing.containers import flatten_batch
from ..resizing.layout import batch_layout
from ..resizing.options import Options
from ..resizing.packing import packed_bounds
from ..utils.checks import check_bool, check_module
from .context_parallel import context_mesh, expect
from .shard_sequence import shard_sequence


class ContextBatches:
    """Takes this rank's part of each batch, and lets a model with `ContextParallel` know what it is::

        with ContextBatches(model) as shard:
            for batch in loader:  # the same on all ranks of the mesh
                model(**shard(scheduler.resize(batch))).loss.backward()

    If the number of ranks divides that of the rows, as when `mode="reshape"` has made many short rows, each rank gets
    whole rows, and attention exchanges nothing. Otherwise each gets a part of the tokens of every row. A rank has as
    many tokens either way, so long rows need no more memory. A packed batch is one row. Call backward before the next
    part is taken: activation checkpointing runs the layers again, which must still expect the same part.

    Pass it to `warmup_allocator` as `shard_batch`, so that both kinds of batches are warmed up.

    Args:
        model: Has layers with `ContextParallel`. It may be wrapped or compiled.
        shift_labels: As for `shard_sequence`.
        keys: As for `shard_sequence`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: The model has no layer with `ContextParallel`. In a call: `shard_sequence` cannot shard the batch.
        RuntimeError: In a call: the ranks hold different batches.
    """

    def __init__(self, model: nn.Module, *, shift_labels: bool = True, keys: Collection[str] | None = None) -> None:
        check_module("model", model)
        mesh = context_mesh(model)
        if mesh is None:
            raise ValueError("model must have layers with ContextParallel, got none: call parallelize_module first")
        check_bool("shift_labels", shift_labels)
        self.mesh = mesh
        self._model, self._shift_labels = model, shift_labels
        self._keys = None if keys is None else tuple(keys)

    def __enter__(self) -> ContextBatches:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __call__(self, batch: Any) -> Any:
        """This rank's part. The model expects such parts until the next call."""
        part, by = self.take(batch)
        self.expect(by)
        return part

    def take(self, batch: Any) -> tuple[Any, str]:
        """This rank's part, and whether it has whole "rows" or "tokens". Call `expect` before the model gets it."""
        by = _kind_of_part(batch, self.mesh.size(), self._keys)
        return shard_sequence(batch, self.mesh, by=by, shift_labels=self._shift_labels, keys=self._keys), by

    def expect(self, by: str) -> None:
        """Let the model take its inputs in training mode for whole "rows", or for "tokens" of all rows."""
        expect(self._model, by)

    def close(self) -> None:
        """Let the model expect tokens, as after `parallelize_module`."""
        self.expect("tokens")


def _kind_of_part(batch: Any, ranks: int, keys: Collection[str] | None) -> str:
    entries = flatten_batch(batch)
    if packed_bounds(entries, 1) is not None:
        return "tokens"
    rows = batch_layout(entries, Options(keys=keys)).batch_size
    return "rows" if rows % ranks == 0 else "tokens"
