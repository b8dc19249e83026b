"""Composer's training of a model with `ContextParallel`: each rank gets its part of every microbatch."""

from __future__ import annotations

from composer.core import State

from ...utils.modules import CONTEXT_PART, NUM_ITEMS_IN_BATCH
from .functional import pass_to_transformers

#: What `shard_sequence` adds to a batch. Models of transformers take it without naming it in their forward.
_ADDED = (
    *(CONTEXT_PART, NUM_ITEMS_IN_BATCH, "shift_labels"),
    *("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"),
)

_COUNTS = ("sample", "token", "token_in_iteration", "sample_in_epoch", "token_in_epoch")


class ContextShards:
    """Shards what the ranks of a mesh train on together.

    Attributes:
        shard: takes this rank's part of a batch.

    Raises:
        ValueError: the trainer has training metrics, or finds the microbatch size itself.
    """

    def __init__(self, state: State) -> None:
        from ...parallel.context_batches import ContextBatches  # loads torch.distributed.tensor

        if state.train_metrics:
            # Composer would compare the logits of a rank's tokens with the labels of all.
            raise ValueError(
                f"the model must have no training metrics under ContextParallel, got {', '.join(state.train_metrics)}"
            )
        if state.auto_microbatching:
            # A rank that is out of memory would leave the others waiting for its keys.
            raise ValueError("device_train_microbatch_size must be a number under ContextParallel, got 'auto'")
        self.shard = ContextBatches(state.model)
        pass_to_transformers(state.model, _ADDED)

    def count_once(self, state: State) -> None:
        """Corrects the timestamp after a batch, to which Composer adds the batch of every rank."""
        before, now, ranks = state.previous_timestamp, state.timestamp, self.shard.mesh.size()
        counts = {name: (getattr(before, name).value, getattr(now, name).value) for name in _COUNTS}
        state.timestamp = now.copy(**{name: old + (new - old) // ranks for name, (old, new) in counts.items()})
