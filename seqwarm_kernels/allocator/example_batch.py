"""Batches of the size that training will use, made from an example."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..ops.resize_batch.schema import SEQUENCE_DIMS, Kind
from ..resizing.containers import flatten_batch, unflatten_batch
from ..resizing.entry_names import own_name
from ..resizing.functional import resize_batch
from ..resizing.layout import Layout, batch_layout
from ..resizing.packing import BOUNDARIES, POSITIONS
from ..utils.modules import ExampleBatch, as_mapping, from_mapping, guess_batch


class TrainingBatches:
    """Makes batches as in training: the example is repeated to (rows, max_len) on the device, then resized.

    Args:
        model: Its inputs are guessed if there is no example.
        example: Any batch of the model, or None.
        max_len: Length of a batch before it is resized.
        device: Device of the batches.
        resize_options: Keyword arguments of `resize_batch`.
        shard: Takes a resized batch, returns this rank's part; None: all of it.

    Raises:
        ValueError: The inputs of the model cannot be guessed.
    """

    def __init__(
        self,
        model: nn.Module,
        example: ExampleBatch | None,
        max_len: int,
        device: torch.device,
        resize_options: Mapping[str, Any] | None,
        shard: Callable[[Any], Any] | None = None,
    ) -> None:
        self._shard = shard
        self.max_len = max_len
        self.device = device
        self.resize_options = dict(resize_options or {})
        if example is None:
            example = guess_batch(model, 1, max_len, device)
            self.resize_options.setdefault("keys", _sequence_names(example, max_len))
        self.example = example

    def example_rows(self) -> int:
        return _layout(flatten_batch(as_mapping(self.example)), self.resize_options).batch_size

    def make(self, rows: int, length: int) -> ExampleBatch:
        """Return a batch of (rows, max_len) after `resize_batch` to `length`, or this rank's part."""
        example = as_mapping(self.example)
        longest = repeated_to(flatten_batch(example), rows, self.max_len, self.resize_options)
        moved = {name: value.to(self.device) if isinstance(value, Tensor) else value for name, value in longest.items()}
        batch = unflatten_batch(example, moved, (rows, self.max_len))
        resized = resize_batch(batch, length, **self.resize_options)
        return from_mapping(resized if self._shard is None else self._shard(resized), self.example)


def repeated_to(batch: Mapping[str, Any], rows: int, length: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rows and tokens of a batch, repeated to (rows, length). Masks become all ones.

    Position ids of one sequence in each row go on counting.
    """
    layout, row_dim = _layout(batch, options), 1 - options.get("seq_dim", 1)
    result = dict(batch)
    for name, kind in layout.kinds.items():
        tensor = _repeat(batch[name], 0 if kind in (Kind.ROW, Kind.SQUARE) else row_dim, rows)
        leading = tensor.dim() - 3 if kind == Kind.SQUARE else 0  # (B, 1, S, S)
        for dim in SEQUENCE_DIMS[kind]:
            tensor = _repeat(tensor, dim + leading if kind == Kind.SQUARE else 1 - row_dim, length)
        is_mask = name.endswith("_mask") and not tensor.is_floating_point()
        result[name] = torch.ones_like(tensor) if is_mask else tensor
    for name, starts in _starts_of_positions(batch, layout, row_dim).items():
        positions = (_repeat(starts, 0, rows) + torch.arange(length, device=starts.device)).to(starts.dtype)
        result[name] = positions if row_dim == 0 else positions.T.contiguous()
    for name, value in batch.items():  # entries without a sequence dimension, such as images, need as many rows
        if name not in layout.kinds and isinstance(value, Tensor) and value.shape[:1] == (layout.batch_size,):
            result[name] = _repeat(value, 0, rows)
    return result


def _starts_of_positions(batch: Mapping[str, Any], layout: Layout, row_dim: int) -> dict[str, Tensor]:
    """Return the first position of each row, (B, 1), by the names of position ids that count one sequence a row."""
    own_names = {name: own_name(name) for name, value in batch.items() if value is not None}
    if not BOUNDARIES.isdisjoint(own_names.values()):  # of several sequences, which are not repeated
        return {}
    found = {}
    for name in layout.kinds:
        positions = batch[name]
        if own_names[name] in POSITIONS and positions.dim() == 2 and not positions.is_meta:
            valid = _valid_tokens(batch, name)
            starts = _starts_of_rows(positions, valid) if row_dim == 0 else _starts_of_rows(positions.T, valid.T)
            if starts is not None:
                found[name] = starts
    return found


def _valid_tokens(batch: Mapping[str, Any], name: str) -> Tensor:
    """Return where the attention mask beside position ids is not 0, or True everywhere without one."""
    positions, mask = batch[name], batch.get(f"{name.removesuffix('position_ids')}attention_mask")
    if isinstance(mask, Tensor) and mask.shape == positions.shape:
        return mask.ne(0)
    return torch.ones_like(positions, dtype=torch.bool)


def _starts_of_rows(positions: Tensor, valid: Tensor) -> Tensor | None:
    """Return the first position of each row, (B, 1), or None if a row holds several sequences.

    Either all tokens are counted, or the valid ones alone, beside padding.
    """
    for counts in (torch.ones_like(valid), valid):
        starts = positions.gather(1, counts.int().argmax(dim=1, keepdim=True))
        is_next = positions == starts + counts.cumsum(dim=1) - 1
        if is_next.where(counts, True).all():
            return starts
    return None


def _sequence_names(batch: Mapping[str, Any], length: int) -> list[str]:
    """Return the names of the entries that have a sequence dimension. Images do not."""
    return [name for name, value in batch.items() if value.dim() == 2 and value.shape[1] == length]


def _layout(batch: Mapping[str, Any], options: Mapping[str, Any]) -> Layout:
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


def _repeat(tensor: Tensor, dim: int, size: int) -> Tensor:
    """Repeat the contents of a dimension up to `size`."""
    return tensor.index_select(dim, torch.arange(size, device=tensor.device) % tensor.shape[dim])
