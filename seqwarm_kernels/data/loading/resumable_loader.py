"""A DataLoader that resumes exactly, with any number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from ...utils.checks import check_count
from ..samplers.planned_batches import BatchingProgress, PlannedBatches
from ..samplers.stream import LengthBatchStream
from .budget import BatchCheck, check_collator, check_num_items, check_prepared_items
from .prepare import ItemDataset


class ResumableLoader:
    """Yields the batches of a DataLoader over a `LengthBatchSampler` or a `LengthBatchStream`, with the state after the
    last yielded batch.

    Workers fetch batches ahead. This loader keeps the position after each batch that was fetched, and moves the sampler
    with the yielded batches only. The state does not depend on the workers: any number of workers may load it.

    Trainers take this loader as it is. It is not a DataLoader, so they do not shard it a second time.

    A batch with more tokens than the planner's `max_tokens` raises a ValueError. The tokens are those of "input_ids" in
    a mapping, else of the first int32 or int64 tensor of at least two dimensions in a mapping, tuple or list, which may
    be nested. Other batches are not checked. With `PaddedCollator`, `PackedCollator` or torch's own collate_fn, an item
    longer than the longest one that was planned for its batch raises a ValueError, too: its length was counted too
    short, or a dataset that is not a `PieceDataset` does not cut it to its piece.

    Args:
        loader: a DataLoader with a `LengthBatchSampler` or a `LengthBatchStream` as its `batch_sampler` and
            `in_order=True`. With a stream, its dataset is an `ItemDataset`.

    Raises:
        TypeError: an argument has the wrong type; or the dataset of `loader` is a list, dict or array and the planner
            may cut items.
        ValueError: `loader` has another batch sampler, or `in_order=False`, or a stream
            and another dataset; or its `collate_fn` is a `PaddedCollator` and the planner packs, or the other way
            round; or the dataset has more or fewer items than a `LengthBatchSampler` has lengths.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        if not isinstance(loader, DataLoader):
            raise TypeError(f"loader must be a DataLoader, got {type(loader).__name__}")
        if not isinstance(loader.batch_sampler, PlannedBatches):
            raise ValueError(
                "loader must have a LengthBatchSampler or a LengthBatchStream as batch_sampler, got "
                f"{type(loader.batch_sampler).__name__}"
            )
        if isinstance(loader.batch_sampler, LengthBatchStream) and not isinstance(loader.dataset, ItemDataset):
            raise ValueError(
                "dataset of loader must be ItemDataset() with a LengthBatchStream, which yields items and no indices, "
                f"got {type(loader.dataset).__name__}"
            )
        if not loader.in_order:
            raise ValueError("loader must have in_order=True: a state counts the batches that were yielded, in order")
        # Other datasets may know pieces.
        if loader.batch_sampler.planner.cuts_items and isinstance(
            loader.dataset, (Sequence, Mapping, Tensor, np.ndarray, TensorDataset)
        ):
            raise TypeError(
                "dataset of loader must be a PieceDataset, because the planner may cut items (too_long, warmup): "
                f"pass PieceDataset(dataset), got {type(loader.dataset).__name__}"
            )
        check_collator("collate_fn of loader", loader.collate_fn, loader.batch_sampler.planner)
        check_num_items("dataset of loader", loader.dataset, loader.batch_sampler)
        check_prepared_items("collate_fn of loader", loader.collate_fn, loader.batch_sampler)
        self._check = BatchCheck(loader.batch_sampler, loader.collate_fn, loader.dataset)
        self._loader = loader
        self._sampler = loader.batch_sampler

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields one epoch, as the sampler's `iter()` does, or the rest of an epoch after `load_state_dict`.

        After an interrupted iteration, a `LengthBatchSampler` starts its next epoch. A `LengthBatchStream` and an
        infinite sampler continue after the last yielded batch. `set_epoch` and `load_state_dict` of the sampler or the
        stream itself have the same effect as those of this loader. An older iterator raises a RuntimeError at its next
        batch after a newer `iter()` or `load_state_dict`.
        """
        return self._sampler.follow(lambda: iter(self._loader), self._check)

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(check_count("epoch", epoch))

    @property
    def progress(self) -> BatchingProgress:
        return self._sampler.progress

    def state_dict(self) -> dict[str, Any]:
        """The sampler's state after the last yielded batch.

        Between two passes over a part of an epoch, it is that of the first one, of which a restart yields the rest.
        Call `end_pass` or `set_epoch` before, to restart with the second one.
        """
        return self._sampler.state_dict()

    def previous_state_dict(self) -> dict[str, Any]:
        """The state before the last yielded batch, for a loop that fetches a batch before it trains on the last one."""
        return self._sampler.previous_state_dict()

    def end_pass(self) -> None:
        """Go to the start of the next pass, where the next `iter()` would go, so that `state_dict` is there."""
        self._sampler.end_pass()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state with the next `iter()`. States of the sampler are accepted as well."""
        self._sampler.load_state_dict(state_dict)
