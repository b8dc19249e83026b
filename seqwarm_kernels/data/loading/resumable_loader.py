"""A DataLoader that resumes exactly, with any number of workers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import DataLoader

from ..samplers.planned_batches import BatchingProgress, PlannedBatches
from ..samplers.sampler import LengthBatchSampler
from ..samplers.stream import LengthBatchStream
from .collate import check_budget
from .prepare import ItemDataset, Prepare


class ResumableLoader:
    """Yields the batches of a DataLoader over a `LengthBatchSampler` or a `LengthBatchStream`, with the state after the
    last yielded batch.

    Workers fetch batches ahead. This loader keeps the position after each batch that was fetched, and moves the sampler
    with the yielded batches only. The state does not depend on the workers: any number of workers may load it.

    Trainers take this loader as it is. It is not a DataLoader, so they do not shard it a second time.

    A batch whose "input_ids" have more than the planner's `max_tokens` tokens, padding included, raises a ValueError. A
    batch without "input_ids" is not checked.

    Args:
        loader: a DataLoader with a `LengthBatchSampler` or a `LengthBatchStream` as its `batch_sampler` and
            `in_order=True`. With a stream, its dataset is an `ItemDataset`.

    Raises:
        ValueError: `loader` has another batch sampler, or `in_order=False`, or a stream and another dataset, or its
            dataset has more or fewer items than a `LengthBatchSampler` has lengths.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        batches = loader.batch_sampler
        if not isinstance(batches, PlannedBatches):
            raise ValueError(f"batch_sampler must be a LengthBatchSampler or LengthBatchStream, got {batches!r:.60}")
        if isinstance(batches, LengthBatchStream) and not isinstance(loader.dataset, ItemDataset):
            raise ValueError(
                f"dataset of loader must be ItemDataset() with a LengthBatchStream, got {type(loader.dataset).__name__}"
            )
        if not loader.in_order:
            raise ValueError("loader must have in_order=True: a state counts the batches that were yielded, in order")
        check_num_items(batches, loader.dataset)
        if isinstance(loader.collate_fn, Prepare):
            check_num_items(batches, loader.collate_fn.dataset)
        self._loader: Any = loader
        self._sampler = batches

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]  # a stream has none

    def __iter__(self) -> Iterator[Any]:
        """Yields one epoch, as the sampler's `iter()` does, or the rest of an epoch after `load_state_dict`.

        After an interrupted iteration, a `LengthBatchSampler` starts its next epoch. A `LengthBatchStream` and an
        infinite sampler continue after the last yielded batch. `set_epoch` and `load_state_dict` of the sampler or the
        stream itself have the same effect as those of this loader. An older iterator raises a RuntimeError at its next
        batch after a newer `iter()` or `load_state_dict`.
        """
        return self._sampler.follow(lambda: map(self._within_budget, self._loader))

    def _within_budget(self, batch: Any) -> Any:
        """The same batch, before it counts as yielded."""
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, Tensor):
            check_budget(ids.numel(), self._sampler.planner.max_tokens)
        return batch

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

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


def check_num_items(batches: PlannedBatches, dataset: Any) -> None:
    """A dataset that knows its size must have as many items as a `LengthBatchSampler` has lengths."""
    if not isinstance(batches, LengthBatchSampler):
        return
    try:
        num_items = len(dataset)
    except Exception:  # the batches do not need this length, so a dataset that raises any error here can be loaded
        return
    if num_items != batches.num_items:
        raise ValueError(
            f"dataset must have as many items as the sampler has lengths, {batches.num_items}, got {num_items}"
        )
