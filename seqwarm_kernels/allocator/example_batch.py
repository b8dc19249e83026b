"""A batch of the size that training will see."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.resize_batch.schema import SEQUENCE_DIMS, Kind
from ..ops.resize_batch.validation import Layout, batch_layout


def sequence_names(batch: Mapping[str, Any], length: int) -> list[str]:
    """The entries of a guessed batch that have a sequence dimension: not its images."""
    return [name for name, value in batch.items() if value.dim() == 2 and value.shape[1] == length]


def layout_of(batch: Mapping[str, Any], options: Mapping[str, Any]) -> Layout:
    """The rows and the length of a batch, and what takes part; `options` are those of resize_batch."""
    layout = batch_layout(
        batch,
        mode="truncate",
        seq_dim=options.get("seq_dim", 1),
        keys=options.get("keys"),
        mask_keys=options.get("mask_keys"),
    )
    if layout.batch_size == 0:
        raise ValueError("example_batch must have at least one row, got 0")
    return layout


def stretched(batch: Mapping[str, Any], rows: int, length: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The batch's own rows and tokens, repeated to (rows, length); masks become all ones."""
    layout, row_dim = layout_of(batch, options), 1 - options.get("seq_dim", 1)
    result = dict(batch)
    for name, kind in layout.kinds.items():
        tensor = _repeated(batch[name], 0 if kind in (Kind.ROW, Kind.SQUARE) else row_dim, rows)
        leading = tensor.dim() - 3 if kind == Kind.SQUARE else 0  # (B, 1, S, S)
        for dim in SEQUENCE_DIMS[kind]:
            tensor = _repeated(tensor, dim + leading if kind == Kind.SQUARE else 1 - row_dim, length)
        is_mask = name.endswith("_mask") and not tensor.is_floating_point()
        result[name] = torch.ones_like(tensor) if is_mask else tensor
    for name, value in batch.items():  # images and the like keep up with the rows
        if name not in layout.kinds and isinstance(value, Tensor) and value.shape[:1] == (layout.batch_size,):
            result[name] = _repeated(value, 0, rows)
    return result


def _repeated(tensor: Tensor, dim: int, size: int) -> Tensor:
    """What a dimension holds, over and over, up to `size`."""
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
