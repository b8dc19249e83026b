"""Planner, collator and dataset must fit together, and no collated batch may be over the planner's budget of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..batch_planning.planner import BatchPlanner
from ..samplers.planned_batches import PlannedBatches
from ..samplers.sampler import LengthBatchSampler
from .collate import PackedCollator, PaddedCollator, check_tokens
from .prepare import Prepare


def check_collator(name: str, collate: Any, planner: BatchPlanner) -> None:
    """If `collate` is a collator of this package, it must be the one that `planner` plans for."""
    if isinstance(collate, Prepare):
        collate = collate.collate
    if planner.packed and isinstance(collate, PaddedCollator):
        raise ValueError(
            f"{name} must be a PackedCollator for a planner with packed=True, got a PaddedCollator: "
            "padding would exceed max_tokens"
        )
    # Without a budget, packing batches of `batch_size` items wastes nothing.
    if not planner.packed and planner.max_tokens is not None and isinstance(collate, PackedCollator):
        raise ValueError(
            f"{name} must be a PaddedCollator for a planner with packed=False, got a PackedCollator: "
            "pass packed=True to BatchPlanner"
        )


def check_num_items(name: str, dataset: Any, batches: PlannedBatches) -> None:
    """A dataset that knows its size must have as many items as a `LengthBatchSampler` has lengths."""
    if not isinstance(batches, LengthBatchSampler):
        return
    try:
        num_items = len(dataset)
    except Exception:  # the batches do not need this length, so a dataset that raises any error here can be loaded
        return
    if num_items != batches.num_items:
        raise ValueError(
            f"{name} must have as many items as the sampler has lengths, {batches.num_items}, got {num_items}: items "
            "without a length would never be served; for a part of a dataset, pass torch.utils.data.Subset(dataset, "
            "indices) and the lengths of its items"
        )


def check_prepared_items(name: str, prepare: Any, batches: PlannedBatches) -> None:
    """The same for the dataset of a `Prepare`."""
    if isinstance(prepare, Prepare) and prepare.dataset is not None:
        check_num_items(f"dataset of {name}", prepare.dataset, batches)


def check_budget(batch: Any, planner: BatchPlanner) -> Any:
    """Return `batch`. Its input_ids, if it has any, must not have more tokens than the planner's budget."""
    input_ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if isinstance(input_ids, Tensor):
        check_tokens(input_ids.numel(), planner.max_tokens)
    return batch
