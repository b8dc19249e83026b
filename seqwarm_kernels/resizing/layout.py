"""Which tensors of a batch are resized, and how. Reads names, shapes, dtypes and devices, not values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops.resize_batch.schema import IGNORED_LABEL, Kind
from ..utils.checks import check_dense, is_dtensor
from .entry_names import is_called_labels, is_filled, is_label, is_loss_mask, is_mask, own_name, warn_once
from .options import check_keys, check_name_arguments, check_names, check_seq_dim, is_list


@dataclass(frozen=True)
class Layout:
    """The common sizes of the tensors of a batch, and how each is resized."""

    batch_size: int
    source_length: int
    kinds: dict[str, Kind]
    row_lists: list[str]  #: lists and tuples with an entry for each row


def batch_layout(
    batch: Mapping[str, Any],
    *,
    mode: str,
    seq_dim: int,
    keys: Collection[str] | None,
    mask_keys: Collection[str] | None,
    dtensors: bool = False,
) -> Layout:
    """Which tensors are resized and how, and their common batch size and sequence length. DTensors only on request."""
    check_seq_dim(seq_dim)
    check_name_arguments(None, keys, mask_keys)
    check_keys(keys, batch)
    check_names("mask_keys", mask_keys, batch)
    taking_part = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() > 0 and (keys is None or name in keys)
    }
    if not taking_part:
        types = ", ".join(f"{name}: {type(value).__name__}" for name, value in batch.items())
        raise ValueError(f"batch must hold a tensor with a sequence dimension to resize, got {types or 'no entry'}")
    for name, tensor in taking_part.items():
        check_dense(f"batch[{name!r}]", tensor)
        if is_dtensor(tensor) and not dtensors:
            raise TypeError(
                f"batch[{name!r}] must be the plain tensor of this rank, got a DTensor: resize its to_local(), or the "
                "batch before it is distributed"
            )
    kinds = {name: _kind(name, tensor, seq_dim, mask_keys) for name, tensor in taking_part.items()}
    if mask_keys is None and seq_dim == 1 and not torch.compiler.is_compiling():
        _warn_of_pairs(taking_part, kinds)
    _check_supported(taking_part, kinds, mode, seq_dim)
    batch_size, source_length = _common_sizes(taking_part, kinds, seq_dim)
    if mode == "truncate":  # the number of rows does not change, so a vector of any length is kept
        kinds = {n: kind for n, kind in kinds.items() if kind != Kind.ROW or len(taking_part[n]) == batch_size}
    _check_rows(taking_part, kinds, batch_size)
    check_one_device(taking_part)
    _check_no_arrays(batch, (batch_size, source_length)[: 2 if mode == "truncate" else 1], keys)
    lists = [] if mode == "truncate" else row_lists(batch, keys, batch_size)
    if lists and mode == "flatten":
        raise _no_place(lists[0], f"of {batch_size} entries")
    return Layout(batch_size, source_length, kinds, lists)


def _check_no_arrays(batch: Mapping[str, Any], sizes: tuple[int, ...], keys: Collection[str] | None) -> None:
    """Arrays of NumPy pass through, so none may have sizes that change."""
    for name, value in batch.items():
        if isinstance(value, np.ndarray) and value.shape[: len(sizes)] == sizes and (keys is None or name in keys):
            raise TypeError(f"batch[{name!r}] must be a tensor to be resized, got an array of NumPy: torch.from_numpy")


def row_lists(batch: Mapping[str, Any], keys: Collection[str] | None, batch_size: int) -> list[str]:
    """Names of the lists and tuples that have an entry for each row."""
    lists = {name: value for name, value in batch.items() if is_list(value)}
    for name in keys or ():
        if name in lists and len(lists[name]) != batch_size:
            raise ValueError(
                f"keys names the list {name!r}: it must have {batch_size} entries, one for each row, got "
                f"{len(lists[name])}"
            )
    return [name for name, value in lists.items() if len(value) == batch_size and (keys is None or name in keys)]


def _no_place(name: str, what: str) -> ValueError:
    return ValueError(
        f"mode='flatten' cannot resize {name!r} {what}: it has an entry for each row, and new rows are cut from one "
        "stream of all rows; leave it out with keys=, or use mode='reshape'"
    )


def _kind(name: str, tensor: Tensor, seq_dim: int, mask_keys: Collection[str] | None) -> Kind:
    if tensor.dim() == 1:
        return Kind.ROW
    if is_square_mask(tensor) and is_mask(name, mask_keys):
        return Kind.SQUARE
    return Kind.LABEL if is_filled(name, tensor.dtype) else Kind.SEQUENCE


def _warn_of_pairs(tensors: Mapping[str, Tensor], kinds: Mapping[str, Kind]) -> None:
    """Warn of entries that have the shape of pairs of tokens and not the name of a mask."""
    for name, tensor in tensors.items():
        if kinds[name] != Kind.SQUARE and is_square_mask(tensor) and not own_name(name).endswith("embeds"):
            warn_once(
                f"batch[{name!r}] has as many features as tokens, and only its tokens are resized. If it holds pairs "
                "of tokens, name it in mask_keys, with the masks over pairs of tokens. Name only those there if it "
                "holds features"
            )


def is_square_mask(tensor: Tensor) -> bool:
    """(B, S, S) or (B, 1, S, S)."""
    has_right_rank = tensor.dim() == 3 or (tensor.dim() == 4 and tensor.shape[1] == 1)
    return has_right_rank and tensor.shape[-1] == tensor.shape[-2]


def _check_supported(tensors: dict[str, Tensor], kinds: dict[str, Kind], mode: str, seq_dim: int) -> None:
    for name, kind in kinds.items():
        shape = tuple(tensors[name].shape)
        if kind == Kind.SQUARE and mode != "truncate":
            raise ValueError(
                f"mode={mode!r} cannot resize {name!r}: a mask {shape} over pairs of tokens would need a mask for "
                "each new row; drop it from the batch, or pass a (batch, sequence) mask"
            )
        if kind == Kind.SQUARE and seq_dim != 1:
            raise ValueError(f"seq_dim must be 1 with the mask {name!r} {shape} over pairs of tokens, got {seq_dim}")
        if kind == Kind.ROW and mode == "flatten":
            raise _no_place(name, str(shape))


def _common_sizes(tensors: dict[str, Tensor], kinds: dict[str, Kind], seq_dim: int) -> tuple[int, int]:
    """(B, S) of every tensor with a sequence dimension."""
    sizes = {}
    for name, kind in kinds.items():
        shape = tensors[name].shape
        if kind == Kind.SQUARE:
            sizes[name] = (shape[0], shape[-1])
        elif kind != Kind.ROW:
            sizes[name] = (shape[1 - seq_dim], shape[seq_dim])
    if not sizes:
        raise ValueError(f"batch must hold a tensor with a sequence dimension to resize, got {_describe(tensors)}")
    first = next(iter(sizes.values()))
    if any(size != first for size in sizes.values()):
        raise ValueError(
            "the tensors of batch must agree on batch size and sequence length, got "
            f"{_describe({name: tensors[name] for name in sizes})}; name those to resize with keys="
        )
    if first[1] == 0:
        raise ValueError(f"batch must have a sequence length of at least 1, got {_describe(tensors)}")
    return first


def _check_rows(tensors: dict[str, Tensor], kinds: dict[str, Kind], batch_size: int) -> None:
    for name, kind in kinds.items():
        if kind == Kind.ROW and tensors[name].shape[0] != batch_size:
            raise ValueError(
                f"mode='reshape' repeats {name!r} for each new row: it must have {batch_size} entries, one for each "
                f"row, got {tensors[name].shape[0]}; leave it out with keys="
            )


def check_one_device(tensors: dict[str, Tensor]) -> None:
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the tensors of batch must be on one device, got {devices}")


def _describe(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def check_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"batch[{name!r}] requires a gradient, which a copy does not carry: detach it, or use views "
            "(copy=False with mode 'truncate')"
        )


def fill_value(
    name: str, kind: Kind, dtype: torch.dtype, pad_values: Mapping[str, float] | None, fills_labels: bool
) -> float:
    """The value of a slot without a source token: the caller's, else −100 for labels and 0 for other tensors."""
    if pad_values is not None and name in pad_values:
        given = pad_values[name]
    else:
        is_ignored_label = kind == Kind.LABEL and fills_labels and not is_loss_mask(name)
        given = _default_label(name, dtype) if is_ignored_label else 0
    if isinstance(given, Real) and not isinstance(given, (int, float)):
        given = int(given) if isinstance(given, Integral) else float(given)  # of NumPy
    if not isinstance(given, (bool, int, float)):
        raise TypeError(f"pad_values[{name!r}] must be a number, got {type(given).__name__}")
    if dtype == torch.bool:
        fits = given in (0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        fits = True
    else:
        limits = torch.iinfo(dtype)
        fits = given == given // 1 and limits.min <= given <= limits.max
    if not fits:
        raise ValueError(f"pad_values[{name!r}] must fit {dtype}, got {given}")
    return given


def _default_label(name: str, dtype: torch.dtype) -> int:
    """−100, unless the name or the dtype leaves open what the entry holds."""
    is_real = dtype.is_floating_point or dtype.is_complex
    if not is_label(name) or (is_real and not is_called_labels(name)):
        raise ValueError(
            f"pad_values must have a value for {name!r} ({dtype}), which may hold labels: the value that the loss "
            f"leaves out, as cross_entropy does with {IGNORED_LABEL}; rename the entry if it holds no labels"
        )
    return IGNORED_LABEL
