"""Recognizes packed batches: one row of several sequences, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .entry_names import BOUNDARIES, INDICES, PACKED_NAMES, POSITIONS, own_name
from .layout import check_plain
from .masks import can_read

#: (N + 1,) int64, boundaries of N sequences. Of arrays this small NumPy takes a fraction of torch's time.
Bounds = NDArray[np.int64]


def packed_bounds(entries: Mapping[Any, Any], seq_dim: int) -> Bounds | None:
    """The boundaries of the sequences of a packed batch. None for other batches.

    The first of these that the batch has is trusted: boundaries, indices of each token's sequence, position ids. It is
    read, which waits for its device.
    """
    names = [name for name in entries if str(name).rpartition(".")[2] in PACKED_NAMES]  # `own_name` of every entry
    telling = [name for name in names if entries[name] is not None]
    boundaries = [name for name in telling if own_name(name) in BOUNDARIES]
    if boundaries:
        bounds = _boundaries(boundaries[0], entries)
        for name in boundaries[1:]:  # collators return one tensor for queries and keys
            if entries[name] is not entries[boundaries[0]] and not np.array_equal(_boundaries(name, entries), bounds):
                raise ValueError(f"batch[{name!r}] must equal the other boundaries, which keys and queries share")
        return bounds
    for name in sorted(telling, key=lambda name: own_name(name) in POSITIONS):
        row = _row_of_tokens(entries[name], entries, seq_dim)
        if row is not None:
            check_plain(name, row)
            starts = _starts(name, row, entries.get(f"{name.removesuffix('position_ids')}attention_mask"))
            is_packed = len(starts) > 0 or entries[name].dim() == 1
            return np.concatenate(([0], starts, [len(row)])) if is_packed else None
    return None


def _boundaries(name: Any, entries: Mapping[Any, Any]) -> Bounds:
    value = entries[name]
    if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"batch[{name!r}] must be int32 or int64 boundaries (sequences + 1,) of one row, got {got}")
    check_plain(name, value)
    return _host_numbers(value)


def _row_of_tokens(numbers: Any, entries: Mapping[Any, Any], seq_dim: int) -> Tensor | None:
    """The numbers (T,) of the tokens of a batch's one row. None for a batch of rows, or for numbers of other things."""
    if not isinstance(numbers, Tensor) or numbers.is_meta or numbers.numel() < 2 or numbers.dim() > 2:
        return None
    if numbers.dim() == 2:
        rows = numbers if seq_dim == 1 else numbers.T
        return rows[0] if len(rows) == 1 else None
    length, is_of_tokens = len(numbers), False
    for name, value in entries.items():
        if isinstance(value, Tensor) and own_name(name) not in PACKED_NAMES:
            is_of_tokens |= value.shape[:1] == (length,) or value.shape[:2] == (1, length)
            is_rows = value.dim() > 1 and len(value) > 1  # of which each has a number, or all share the numbers
            if is_rows and (not value.is_floating_point() or value.shape[seq_dim] == length):
                return None
    return numbers if is_of_tokens else None


def _starts(name: str, row: Tensor, mask: object) -> NDArray[np.int64]:
    """The first token of each sequence but the first: where an index changes, or a position does not follow the last.

    Beside tokens that an attention mask hides, which may have any position, a position only must not fall.
    """
    is_index = own_name(name) in INDICES
    mask = mask.flatten() if isinstance(mask, Tensor) and mask.numel() == len(row) else None
    if not can_read(row):
        changes = row.diff() != (0 if is_index else 1)
        if mask is not None:
            changes = changes & (mask[1:] != 0) & (mask[:-1] != 0)
        torch._assert_async(
            ~changes.any(), "position_ids or seq_idx hold packed sequences: resize them outside of the graph"
        )
        return np.zeros(0, np.int64)
    numbers = _host_numbers(row)
    if is_index:
        return (numbers[1:] != numbers[:-1]).nonzero()[0] + 1
    valid = np.arange(len(row)) if mask is None else _host_numbers(mask != 0).nonzero()[0]
    changed = np.diff(numbers[valid])
    return valid[1:][changed != 1 if len(valid) == len(row) else changed <= 0]


def _host_numbers(numbers: Tensor) -> NDArray[np.int64]:
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        # Tensors may have no storage. A trace refuses `item`, and would not see other ways to read.
        return np.array([number.item() for number in numbers], np.int64)
    array: NDArray[np.int64] = numbers.numpy(force=True).astype(np.int64, copy=False)
    return array
