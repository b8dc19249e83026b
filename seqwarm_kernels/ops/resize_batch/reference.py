"""The definition of `resize_batch` in plain PyTorch: an index map from the slots of new rows to source tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..library import implement
from .schema import SKIPPING, Kind, allocate, new_rows


class SourceMap(NamedTuple):
    """The source of each slot of the new batch. All tensors are (B', L)."""

    row: Tensor
    position: Tensor  # S or more: the slot has no source token and is filled
    repeated: Tensor  # an earlier new row holds the token already


def source_map(
    batch_size: int, source_length: int, new_length: int, rule: str, attention_mask: Tensor | None, device: torch.device
) -> SourceMap:
    rows = new_rows(batch_size, source_length, new_length, rule)
    new_row = torch.arange(rows, device=device)[:, None]
    slot = torch.arange(new_length, device=device).expand(rows, new_length)
    if rule == "flatten":
        token = new_row * new_length + slot
        return SourceMap(token // source_length, token % source_length, torch.zeros_like(token, dtype=torch.bool))

    chunks = rows // max(batch_size, 1)
    row = (new_row // max(chunks, 1)).expand_as(slot)
    chunk_start = new_row % max(chunks, 1) * new_length
    if rule == "reshape_overlap":
        position = chunk_start.clamp(max=source_length - new_length) + slot
    else:
        position = chunk_start + slot
    if rule in SKIPPING:
        assert attention_mask is not None
        position = position + truncation_start(attention_mask, new_length)[:, None]
    if rule == "truncate_keep_last":
        assert attention_mask is not None
        last_valid = last_valid_position(attention_mask)[:, None]
        position = torch.where((slot == new_length - 1) & (last_valid > position), last_valid, position)
    return SourceMap(row, position, position < chunk_start)


def truncation_start(attention_mask: Tensor, new_length: int) -> Tensor:
    """(B,): the position of the first token that truncation keeps: the first valid one, or an earlier one where fewer
    than `new_length` tokens follow. 0 in rows without a valid token."""
    first_valid = (attention_mask != 0).to(torch.uint8).argmax(dim=1)
    return first_valid.clamp(max=attention_mask.shape[1] - new_length)


def last_valid_position(attention_mask: Tensor) -> Tensor:
    """(B,): the position of the last valid token of each row, -1 in rows without one."""
    count = torch.arange(1, attention_mask.shape[1] + 1, device=attention_mask.device)
    return ((attention_mask != 0) * count).amax(dim=1) - 1


def resize(tensor: Tensor, source: SourceMap, kind: int, fill_value: float) -> Tensor:
    """Resize one tensor of the batch."""
    if kind == Kind.ROW:
        return tensor[source.row[:, 0]]
    length = tensor.shape[1]
    position = source.position.clamp(max=length - 1)
    if kind == Kind.SQUARE:
        return tensor[source.row[:, :, None], position[:, :, None], position[:, None, :]]
    filled = source.position >= length
    if kind == Kind.LABEL:
        filled = filled | source.repeated
    taken = tensor[source.row, position]
    filled = filled.view(*filled.shape, *[1] * (taken.dim() - 2))
    return torch.where(filled, taken.new_full((), fill_value), taken)  # masked_fill lacks dtypes


def row_info(source: SourceMap, attention_mask: Tensor | None, source_length: int) -> list[Tensor]:
    """valid_lengths (B') int32, position_ids (B', L) int64, num_valid_tokens () int64."""
    valid = source.position < source_length
    if attention_mask is not None:
        valid = valid & (attention_mask[source.row, source.position.clamp(max=source_length - 1)] != 0)
    before = valid.cumsum(dim=1) - 1
    return [valid.sum(dim=1, dtype=torch.int32), before.masked_fill(~valid, 0), valid.sum()]


def resize_batch_out(
    inputs: list[Tensor],
    attention_mask: Tensor | None,
    batch_size: int,
    source_length: int,
    new_length: int,
    rule: str,
    kinds: list[int],
    fill_values: list[float],
    return_info: bool,
    outputs: list[Tensor],
) -> None:
    new_length = min(new_length, source_length)
    if not outputs:
        return
    device = outputs[0].device
    inputs = [tensor.to(device) for tensor in inputs]  # those in pinned memory
    attention_mask = None if attention_mask is None else attention_mask.to(device)
    source = source_map(batch_size, source_length, new_length, rule, attention_mask, device)
    results = [resize(*entry) for entry in zip(inputs, [source] * len(inputs), kinds, fill_values, strict=True)]
    if return_info:
        results += row_info(source, attention_mask, source_length)
    for output, result in zip(outputs, results, strict=True):
        output.copy_(result)


def resize_batch(*arguments: object) -> list[Tensor]:
    outputs = allocate(*arguments)  # type: ignore[arg-type]
    resize_batch_out(*arguments, outputs)  # type: ignore[call-arg, arg-type]
    return outputs


implement("resize_batch", "reference", resize_batch)
implement("resize_batch_out", "reference", resize_batch_out)
