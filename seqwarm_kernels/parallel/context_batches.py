"""The batches of a training with `ContextParallel`: whole rows for each rank where that is possible, else tokens."""

from __future__ import annotations

from collections.abc import Collection, MutableMapping
from typing import Any

from torch import nn

from ..resizing.containers import flatten_batch
from ..resizing.layout import batch_layout
from ..resizing.options import Options
from ..resizing.packing import packed_bounds
from ..utils.checks import check_bool
from .context_parallel import context_mesh
from .shard_sequence import shard_sequence


class ContextBatches:
    """Takes this rank's part of each batch of a training with `ContextParallel`::

        shard = ContextBatches(model)
        for batch in loader:  # the same on all ranks of the mesh
            model(**shard(scheduler.resize(batch))).loss.backward()

    If the number of ranks divides that of the rows, as when `mode="reshape"` has made many short rows, each rank gets
    whole rows, and attention exchanges nothing. Otherwise each gets a part of the tokens of every row. A rank has as
    many tokens either way, so long rows need no more memory. A packed batch is one row. The part says in the entry
    "context_part" which of them it is.

    Pass it to `warmup_allocator` as `shard_batch`, so that both kinds of batches are warmed up.

    Args:
        model: Has layers with `ContextParallel`. It may be wrapped or compiled.
        shift_labels: As for `shard_sequence`.
        keys: As for `shard_sequence`.

    Raises:
        TypeError: An argument has the wrong type. In a call: the batch is not a mutable mapping.
        ValueError: The model has no layer with `ContextParallel`. In a call: `shard_sequence` cannot shard the batch.
        RuntimeError: In a call: the ranks hold different batches.
    """

    def __init__(self, model: nn.Module, *, shift_labels: bool = True, keys: Collection[str] | None = None) -> None:
        mesh = context_mesh(model)
        if mesh is None:
            raise ValueError("model must have layers with ContextParallel, got none: call parallelize_module first")
        check_bool("shift_labels", shift_labels)
        self.mesh = mesh
        self._shift_labels = shift_labels
        self._keys = None if keys is None else tuple(keys)

    def __call__(self, batch: Any) -> Any:
        """This rank's part."""
        if not isinstance(batch, MutableMapping):
            raise TypeError(f"batch must be a mapping, which says what a rank has of it, got {type(batch).__name__}")
        by = _kind_of_part(batch, self.mesh.size(), self._keys)
        return shard_sequence(batch, self.mesh, by=by, shift_labels=self._shift_labels, keys=self._keys)


def _kind_of_part(batch: Any, ranks: int, keys: Collection[str] | None) -> str:
    entries = flatten_batch(batch)
    if packed_bounds(entries, 1) is not None:
        return "tokens"
    rows = batch_layout(entries, Options(keys=keys)).batch_size
    return "rows" if rows % ranks == 0 else "tokens"
