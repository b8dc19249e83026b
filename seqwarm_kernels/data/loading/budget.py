"""Planner, collator and dataset must fit together, and no collated batch may be larger than planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ..batch_planning.planner import BatchPlanner
from ..samplers.planned_batches import PlannedBatches
from ..samplers.sampler import LengthBatchSampler
from ..samplers.stream import LengthBatchStream
from .collate import PackedCollator, PaddedCollator, check_tokens
from .prepare import PieceDataset, Prepare


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


class BatchCheck:
    """Checks collated batches against their plan: the budget of tokens, and the longest item.

    Args:
        batches: what planned the batches.
        collate: what collates them.
        dataset: where their items come from.
    """

    def __init__(self, batches: PlannedBatches, collate: Any, dataset: Any = None) -> None:
        self._planner = batches.planner
        self._lengths = "length" if isinstance(batches, LengthBatchStream) else "lengths"
        # These two cut items to their pieces, perhaps with a function of the user.
        cuts = self._planner.cuts_items and (isinstance(collate, Prepare) or isinstance(dataset, PieceDataset))
        collate = collate.collate if isinstance(collate, Prepare) else collate
        self._longest_of = None if cuts else _longest_of(collate)
        # Torch's collate_fn does not pad, so the dataset may have padded its whole items.
        may_be_padded = collate is default_collate and not self._planner.cuts_items
        self._multiple_of = self._planner.multiple_of if may_be_padded else 1

    def __call__(self, batch: Any, planned: int) -> Any:
        """Return `batch`, whose longest item was planned to have `planned` tokens."""
        if self._longest_of is not None:
            planned = -(-planned // self._multiple_of) * self._multiple_of
            self._check_longest(self._longest_of(batch, planned), planned)
        tokens = _tokens_of(batch)
        if tokens is not None:
            check_tokens(tokens.shape[:2].numel(), self._planner.max_tokens)
        return batch

    def _check_longest(self, longest: int, planned: int) -> None:
        if longest <= planned:
            return
        if self._planner.cuts_items:
            raise ValueError(
                f"dataset of loader must cut items to their pieces, of at most {planned} tokens in this batch, got an "
                f"item of {longest}: pass PieceDataset(dataset), or return only tokens `start` to `start + length` for "
                "a Piece"
            )
        raise ValueError(
            f"{self._lengths} must count the tokens of items as they are collated, at most {planned} in this batch, "
            f"got an item of {longest}: count its input_ids, with tokens that are added later, such as an end of text"
        )


def _longest_of(collate: Any) -> Callable[[Any, int], int] | None:
    """A function of a batch and of the planned length. It returns the length of the longest item if that is longer.

    None: `collate` may have padded the items.
    """
    return _longest_stacked if collate is default_collate else _LONGEST.get(type(collate))


def _tokens_of(batch: Any) -> Tensor | None:
    """The input_ids, else the first tensor that looks like them. Not the largest, since targets may be longer."""
    if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor):
        return batch["input_ids"]
    found = list(_tensors(batch))
    named = (tensor for name, tensor in found if name == "input_ids")
    unnamed = (tensor for _, tensor in found if _looks_like_ids(tensor))
    return next(chain(named, unnamed), None)


def _tensors(batch: Any, name: Any = None) -> Iterator[tuple[Any, Tensor]]:
    """The tensors of a batch with their names, also those of nested mappings, tuples and lists."""
    if isinstance(batch, Tensor):
        yield name, batch
    elif isinstance(batch, Mapping):
        for key, entry in batch.items():
            yield from _tensors(entry, key)
    elif isinstance(batch, (tuple, list)):
        for entry in batch:
            if not _holds_values(entry):
                yield from _tensors(entry)


def _holds_values(entry: Any) -> bool:
    """Whether this is a list of numbers or text, such as the tokens of an item. It may be long."""
    return isinstance(entry, (tuple, list)) and len(entry) > 0 and isinstance(entry[0], (int, float, str))


def _looks_like_ids(tensor: Tensor) -> bool:
    return tensor.dtype in (torch.int32, torch.int64) and tensor.ndim >= 2


def _longest_stacked(batch: Any, _: int) -> int:
    """Torch stacks items of equal lengths."""
    tokens = _tokens_of(batch)
    return 0 if tokens is None or tokens.ndim < 2 else tokens.shape[1]


def _longest_padded(batch: Any, planned: int) -> int:
    """Tokens are counted only where the rows are wider than planned, because it takes time."""
    rows, width = batch["attention_mask"].shape
    return int(batch["attention_mask"].sum(1).amax()) if rows and width > planned else 0


def _longest_packed(batch: Any, _: int) -> int:
    """A batch of one token may be that of no items."""
    return batch["max_length_q"] if batch["input_ids"].numel() > 1 else 0


_LONGEST: dict[Any, Callable[[Any, int], int]] = {
    PackedCollator: _longest_packed,
    PaddedCollator: _longest_padded,
}
