"""Planner, collator and dataset must fit together, and no collated batch may be over the planner's budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

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
    """Return `batch`. It must not have more tokens than the planner's budget, as far as they are found."""
    tokens = _tokens_of(batch)
    if tokens is not None:
        check_tokens(tokens.shape[:2].numel(), planner.max_tokens)
    return batch


def longest_of(collate: Any) -> Callable[[Any], int] | None:
    """A function that returns the length of the longest item of a batch. None: `collate` may have padded it."""
    if collate is default_collate:
        return _longest_stacked
    return _LONGEST.get(type(collate))


def check_pieces(planned: Sequence[Any], longest: int) -> None:
    """No item of a batch, of `longest` tokens at most, may be longer than the longest piece that was planned."""
    length = max((entry.length for entry in planned), default=longest)
    if longest > length:
        raise ValueError(
            f"dataset of loader must cut items to their pieces, of at most {length} tokens in this batch, got an item "
            f"of {longest}: pass PieceDataset(dataset), or return only tokens `start` to `start + length` for a Piece"
        )


def _tokens_of(batch: Any) -> Tensor | None:
    """The input_ids, else the first tensor that looks like them. Not the largest, since targets may be longer."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"]
    entries = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
    return next((entry for entry in entries if isinstance(entry, Tensor) and _looks_like_ids(entry)), None)


def _looks_like_ids(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64) and tensor.ndim >= 2


def _longest_stacked(batch: Any) -> int:
    """Torch stacks items of equal lengths."""
    tokens = _tokens_of(batch)
    return 0 if tokens is None or tokens.ndim < 2 else tokens.shape[1]


_LONGEST: dict[Any, Callable[[Any], int]] = {
    PackedCollator: lambda batch: batch["max_length_q"],
    PaddedCollator: lambda batch: int(batch["attention_mask"].sum(1).amax()) if len(batch["attention_mask"]) else 0,
}
