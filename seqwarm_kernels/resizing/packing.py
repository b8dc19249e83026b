"""Recognizes packed batches: one row of several sequences, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .entry_names import BOUNDARIES, INDICES, LONGEST, POSITIONS, is_label, is_loss_mask, own_name
from .layout import check_plain
from .masks import can_read

#: (N + 1,) int64, boundaries of N sequences. Of arrays this small NumPy takes a fraction of torch's time.
Bounds = NDArray[np.int64]


_roles: dict[tuple[Any, ...], dict[Any, str]] = {}  # of the names of a batch


def roles_of(entries: Mapping[Any, Any]) -> dict[Any, str]:
    """What each entry is in a packed batch: "boundaries", "longest", "positions", "indices", "labels", or ""."""
    names = tuple(entries)
    if torch.compiler.is_compiling():
        return {name: _role_of(own_name(name)) for name in names}
    if names not in _roles:
        if len(_roles) >= 256:  # a training run has one or two
            _roles.clear()
        _roles[names] = {name: _role_of(own_name(name)) for name in names}
    return _roles[names]


def _role_of(own: str) -> str:
    groups = {"boundaries": BOUNDARIES, "longest": LONGEST, "positions": POSITIONS, "indices": INDICES}
    for role, names in groups.items():
        if own in names:
            return role
    return "labels" if is_label(own) or is_loss_mask(own) else ""


def packed_bounds(entries: Mapping[Any, Any], seq_dim: int) -> Bounds | None:
    """The boundaries of the sequences of a packed batch. None for other batches.

    The first of these that the batch has is trusted: boundaries, indices of each token's sequence, position ids. It is
    read, which waits for its device.
    """
    roles = roles_of(entries)
    boundaries = [name for name, role in roles.items() if role == "boundaries" and entries[name] is not None]
    if boundaries:
        return _bounds_of(entries, boundaries)
    for telling in ("indices", "positions"):
        for name in [name for name, role in roles.items() if role == telling]:
            row = _row_of_tokens(entries[name], entries, seq_dim)
            if row is not None:
                check_plain(name, row)
                starts = _starts(row, telling, entries.get(f"{name.removesuffix('position_ids')}attention_mask"))
                is_packed = len(starts) > 0 or entries[name].dim() == 1
                return np.concatenate(([0], starts, [len(row)])) if is_packed else None
    return None


def _bounds_of(entries: Mapping[Any, Any], names: list[Any]) -> Bounds:
    """The first of the boundaries. Others must equal it, since keys are cut where queries are."""
    source = bounds = None
    for name in names:
        value = entries[name]
        if value is source:
            continue
        if not isinstance(value, Tensor) or value.dtype not in (torch.int32, torch.int64) or value.dim() != 1:
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"batch[{name!r}] must be int32 or int64 boundaries (sequences + 1,) of one row, got {got}")
        check_plain(name, value)
        numbers = _host_numbers(value)
        if bounds is not None and not np.array_equal(numbers, bounds):
            raise ValueError(f"batch[{name!r}] must equal the other boundaries, which keys and queries share")
        source, bounds = value, numbers
    assert bounds is not None
    return bounds


def _row_of_tokens(numbers: Any, entries: Mapping[Any, Any], seq_dim: int) -> Tensor | None:
    """The numbers (T,) of the tokens of a batch's one row. None for a batch of rows, or for numbers of other things."""
    if not isinstance(numbers, Tensor) or numbers.is_meta or numbers.numel() < 2 or numbers.dim() > 2:
        return None
    if numbers.dim() == 2:
        rows = numbers if seq_dim == 1 else numbers.T
        return rows[0] if len(rows) == 1 else None
    length, is_of_tokens = len(numbers), False
    for name, role in roles_of(entries).items():
        value = entries[name]
        if isinstance(value, Tensor) and role in ("", "labels"):
            is_of_tokens |= value.shape[:1] == (length,) or value.shape[:2] == (1, length)
            is_rows = value.dim() > 1 and len(value) > 1  # of which each has a number, or all share the numbers
            if is_rows and (not value.is_floating_point() or value.shape[seq_dim] == length):
                return None
    return numbers if is_of_tokens else None


def _starts(row: Tensor, telling: str, mask: object) -> NDArray[np.int64]:
    """The first token of each sequence but the first: where an index changes, or a position does not follow the last.

    Beside tokens that an attention mask hides, which may have any position, a position only must not fall.
    """
    mask = mask.flatten() if isinstance(mask, Tensor) and mask.numel() == len(row) else None
    if not can_read(row):
        changes = row.diff() != (0 if telling == "indices" else 1)
        if mask is not None:
            changes = changes & (mask[1:] != 0) & (mask[:-1] != 0)
        torch._assert_async(
            ~changes.any(), "position_ids or seq_idx hold packed sequences: resize them outside of the graph"
        )
        return np.zeros(0, np.int64)
    numbers = _host_numbers(row)
    if telling == "indices":
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
