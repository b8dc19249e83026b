"""Which tensors of a batch are resized, and along which dimensions: from names, shapes, dtypes and devices."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..ops.resize_batch.schema import Kind
from ..utils.checks import check_dense, is_dtensor
from .entry_names import POSITIONS, is_label, is_loss_mask, is_mask, own_name
from .options import Options


class Axes(NamedTuple):
    """How a tensor is resized, and which of its dimensions count rows and tokens."""

    kind: Kind
    rows: int | None  #: None if all rows of the tensor are cut alike, as they share it, or it differs between heads
    tokens: tuple[int, ...]  #: two in a mask over pairs of tokens, none in a tensor with one entry for each row


@dataclass(frozen=True)
class Layout:
    """The common sizes of the tensors of a batch, and how each is resized."""

    batch_size: int
    source_length: int
    axes: dict[str, Axes]
    row_lists: list[str]  #: lists and tuples with an entry for each row


def batch_layout(batch: Mapping[str, Any], options: Options) -> Layout:
    """Which tensors are resized and how, and their common batch size and sequence length."""
    mode, keys = options.mode, options.keys
    chosen = {name: value for name, value in batch.items() if keys is None or name in keys}
    tensors = {name: value for name, value in chosen.items() if isinstance(value, Tensor) and value.dim() > 0}
    for name, tensor in tensors.items():
        check_plain(name, tensor)
    check_one_device(tensors.values())
    batch_size, length = sizes = _common_sizes(tensors, options)
    axes = {}
    for name, tensor in tensors.items():
        found = _axes_of(name, tensor, sizes, options)
        if found is None:
            raise _disagreement(tensors)
        if found.kind == Kind.ROW and len(tensor) != batch_size:  # weights of classes, say
            continue
        if mode != "truncate" and (found.rows is None or found.kind == Kind.SQUARE):
            what = f"{name!r} {tuple(tensor.shape)}, which rows share or which holds pairs of tokens"
            raise ValueError(f"mode={mode!r} cannot resize {what}")
        axes[name] = found
    changing = sizes if mode == "truncate" else sizes[:1]
    for name, value in chosen.items():  # arrays and lists pass through, so none may have sizes that change
        is_array = isinstance(value, np.ndarray) and value.shape[: len(changing)] == changing
        parts = value if isinstance(value, (list, tuple)) else ()
        if is_array or any(isinstance(part, Tensor) and part.shape[:2] == sizes for part in parts):
            raise TypeError(f"batch[{name!r}] must be a tensor to be resized, got {type(value).__name__}")
    lists = [] if mode == "truncate" else row_lists(batch, keys, batch_size)
    of_rows = [*(name for name, found in axes.items() if found.kind == Kind.ROW), *lists]
    if of_rows and mode == "flatten":
        raise ValueError(f"mode='flatten' cannot resize {of_rows[0]!r}, which has one entry for each row")
    return Layout(batch_size, length, axes, lists)


def check_names(argument: str, names: Collection[str] | None, batch: Mapping[str, object]) -> None:
    """All `names` must be names of tensors, lists or tuples in the batch."""
    for name in names or ():
        if not isinstance(batch.get(name), (Tensor, list, tuple)):
            tensors = [name for name, value in batch.items() if isinstance(value, Tensor)]
            raise ValueError(f"{argument} names {name!r}, the tensors of the batch are {tensors}")


def check_plain(name: str, tensor: Tensor) -> None:
    """`tensor` must be dense, and not distributed."""
    check_dense(f"batch[{name!r}]", tensor)
    if is_dtensor(tensor):
        raise TypeError(f"batch[{name!r}] must be a plain tensor, got a DTensor; resize its to_local()")


def check_one_device(tensors: Iterable[Tensor]) -> None:
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise ValueError(f"the tensors of batch must be on one device, got {sorted(map(str, devices))}")


def row_lists(batch: Mapping[str, Any], keys: Collection[str] | None, rows: int) -> list[str]:
    """Names of the lists and tuples that have an entry for each row."""
    lists = {name: value for name, value in batch.items() if type(value) in (list, tuple) and len(value) == rows}
    return [name for name in lists if keys is None or name in keys]


def is_over_pairs(name: str, tensor: Tensor, mask_keys: Collection[str] | None) -> bool:
    """Whether the tensor is a mask (..., S, S) over pairs of tokens, by its name and shape."""
    return tensor.dim() > 2 and tensor.shape[-1] == tensor.shape[-2] and is_mask(name, mask_keys)


def _common_sizes(tensors: dict[str, Tensor], options: Options) -> tuple[int, int]:
    """(B, S) of the tensors of tokens. Masks and position ids, which rows may share, are asked only without others."""
    of_tokens: set[tuple[int, int]] = set()
    others: set[tuple[int, int]] = set()
    for name, tensor in tensors.items():
        shape, is_positions, named_mask = tensor.shape, own_name(name) in POSITIONS, is_mask(name, options.mask_keys)
        if tensor.dim() == 1:
            continue
        if is_over_pairs(name, tensor, options.mask_keys):
            size = (shape[0], shape[-1])
        elif is_positions and tensor.dim() > 2:
            size = (shape[-2], shape[-1])
        else:
            size = (shape[1 - options.seq_dim], shape[options.seq_dim])
        (others if is_positions or named_mask else of_tokens).add(size)
    sizes = of_tokens or others
    if len(sizes) > 1:
        raise _disagreement(tensors)
    if not sizes:
        raise ValueError(f"batch must hold a tensor with a sequence dimension to resize, got {list(tensors)}")
    ((batch_size, length),) = sizes
    if length == 0:
        raise ValueError("batch must have a sequence length of at least 1, got 0")
    return batch_size, length


def _disagreement(tensors: Mapping[str, Tensor]) -> ValueError:
    shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items() if tensor.dim() > 1)
    return ValueError(f"the tensors of batch must agree on batch size and sequence length, got {shapes}")


def _axes_of(name: str, tensor: Tensor, sizes: tuple[int, int], options: Options) -> Axes | None:
    """The axes of a tensor in a batch of (B, S), or None if it does not fit."""
    (batch_size, length), shape, dims, seq_dim = sizes, tensor.shape, tensor.dim(), options.seq_dim
    is_positions, named_mask = own_name(name) in POSITIONS, is_mask(name, options.mask_keys)
    kind = Kind.LABEL if is_label(name) or is_loss_mask(name) else Kind.SEQUENCE
    if is_positions and shape == (length,):
        return Axes(kind, None, (0,))
    if dims == 1:
        return Axes(Kind.ROW, 0, ())
    if is_positions and dims > 2 and shape[-2:] in ((batch_size, length), (1, length)):  # (3, B, S) of Qwen-VL
        return Axes(kind, dims - 2 if shape[-2] == batch_size else None, (dims - 1,))
    if named_mask and shape[-2:] == (length, length) and (dims > 2 or batch_size != length):
        of_rows = shape[:-2] in ((batch_size,), (batch_size, 1))
        return Axes(Kind.SQUARE, 0 if of_rows else None, (dims - 2, dims - 1))
    rows_and_tokens = (shape[1 - seq_dim], shape[seq_dim])
    if rows_and_tokens == sizes:
        return Axes(kind, 1 - seq_dim, (seq_dim,))
    if rows_and_tokens == (1, length) and (is_positions or named_mask):
        return Axes(kind, None, (seq_dim,))
    return None
