"""Resizes a packed batch: one row of several sequences, each of which is cut on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.resize_packed.reference import new_tokens_of, resize
from ..ops.resize_packed.schema import LACKING, PackedKind, Pieces, cut_sequences
from ..utils.checks import has_tangent
from .entry_names import BOUNDARIES, INDICES, LONGEST, POSITIONS, is_label, is_loss_mask, own_name
from .layout import check_one_device, check_plain, is_over_pairs, row_lists
from .options import Options, fill_value
from .packing import Bounds

_RARE_DTYPES = {dtype for dtypes in LACKING.values() for dtype in dtypes}  #: which a backend lacks


def resize_packed(
    entries: Mapping[str, Any],
    bounds: Bounds,
    options: Options,
    pad_values: Mapping[str, float] | None,
    seq_len: int,
    copy: bool,
    return_info: bool,
) -> tuple[dict[str, Any], list[Tensor]]:
    """As `Plan.run`. Nothing is kept for the next batch, whose sequences have other lengths.

    `bounds` are the boundaries of the sequences. The new rows are the new sequences.
    """
    rule = options.rule()
    if options.keep_last_token:
        raise ValueError("keep_last_token must be False for a packed batch, got True")
    packed = _packed_tensors(entries, bounds, options)
    device = next(iter(packed.values()))[0].device
    pieces, new_bounds = cut_sequences(bounds, seq_len, rule)
    is_changed = copy or not np.array_equal(new_bounds, bounds)
    if not is_changed:
        if not return_info:
            return {}, []
        packed = {}
    tensors, kinds = [tensor for tensor, _ in packed.values()], [int(kind) for _, kind in packed.values()]
    fill_values = [
        fill_value(name, tensor.dtype, pad_values, rule == "reshape_overlap" and kind == PackedKind.LABEL)
        for name, (tensor, kind) in packed.items()
    ]
    mask = _mask(entries, int(bounds[-1])) if return_info else None
    table, new_tokens = _on_device(pieces, device), int(new_bounds[-1])
    rare = next((tensor.dtype for tensor in tensors if tensor.dtype in _RARE_DTYPES), None)
    operator = overload("resize_packed", backends.choose("resize_packed", device.type, options.backend, rare))
    results = operator(tensors, mask, table, new_tokens, kinds, fill_values, return_info)
    info = [results[-3], results[-2][None], results[-1]] if return_info else []
    if not is_changed:
        return {}, info
    for index, tensor in enumerate(tensors):
        # The operator carries no gradient and no tangent, its definition does.
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        if needs_gradient or (tensor.is_floating_point() and has_tangent(tensor)):
            tokens = new_tokens_of(table, new_tokens)
            results[index] = resize(tensor, table, tokens, kinds[index], fill_values[index])
    new_entries = _new_boundaries(entries, new_bounds)
    for name, result in zip(packed, results, strict=False):
        new_entries[name] = result if result.dim() == entries[name].dim() else result[None]
    for name in row_lists(entries, options.keys, len(bounds) - 1):
        new_entries[name] = type(entries[name])(entries[name][index] for index in pieces[Pieces.SEQUENCE].tolist())
    return new_entries, info


def _packed_tensors(
    entries: Mapping[str, Any], bounds: Bounds, options: Options
) -> dict[str, tuple[Tensor, PackedKind]]:
    """The tensors that are resized, as (T, features...) or (N,). Positions and indices need no name in `keys`."""
    packed: dict[str, tuple[Tensor, PackedKind]] = {}
    tokens, sequences = int(bounds[-1]), len(bounds) - 1
    for name, value in entries.items():
        if not isinstance(value, Tensor) or value.dim() == 0:
            continue
        own, is_named = own_name(name), options.keys is None or name in options.keys
        if own in BOUNDARIES or own in LONGEST or not (is_named or own in POSITIONS or own in INDICES):
            continue
        check_plain(name, value)
        if is_over_pairs(name, value, options.mask_keys):
            raise ValueError(f"batch[{name!r}] must not be a mask over pairs of tokens in a packed batch")
        if value.shape[0] == tokens:
            packed[name] = value, _kind_of_tokens(own)
        elif value.shape[:2] == (1, tokens):
            packed[name] = value.squeeze(0), _kind_of_tokens(own)
        elif value.shape == (sequences,):
            packed[name] = value, PackedKind.SEQUENCE
        elif is_named and value.shape != (1,):
            raise ValueError(f"batch[{name!r}] must have one row of {tokens} tokens, got {tuple(value.shape)}")
    if all(kind == PackedKind.SEQUENCE for _, kind in packed.values()):
        raise ValueError(f"batch must hold a tensor of the {tokens} packed tokens to resize, got {list(entries)}")
    check_one_device(tensor for tensor, _ in packed.values())
    return packed


def _kind_of_tokens(own: str) -> PackedKind:
    if own in POSITIONS:
        return PackedKind.POSITION
    if own in INDICES:
        return PackedKind.INDEX
    return PackedKind.LABEL if is_label(own) or is_loss_mask(own) else PackedKind.TOKEN


def _mask(entries: Mapping[str, Any], tokens: int) -> Tensor | None:
    """(tokens,): the attention mask of the packed tokens, if there is one."""
    masks = [value for name, value in entries.items() if own_name(name) == "attention_mask"]
    return next((mask.flatten() for mask in masks if isinstance(mask, Tensor) and mask.numel() == tokens), None)


def _new_boundaries(entries: Mapping[str, Any], new_bounds: Bounds) -> dict[str, Any]:
    """The new boundaries and the length of the longest sequence, where the batch holds them."""
    new_entries: dict[str, Any] = {}
    made: dict[int, Tensor] = {}  # by the old one: collators return one tensor for queries and keys
    longest = int((new_bounds[1:] - new_bounds[:-1]).max(initial=0))
    for name, value in entries.items():
        own = own_name(name)
        if own in BOUNDARIES and value is not None:
            if id(value) not in made:
                boundaries = new_bounds.astype(np.int32 if value.dtype == torch.int32 else np.int64)
                made[id(value)] = _on_device(torch.from_numpy(boundaries), value.device)
            new_entries[name] = made[id(value)]
        elif own in LONGEST and value is not None:
            new_entries[name] = torch.full_like(value, longest) if isinstance(value, Tensor) else longest
    return new_entries


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device of the batch. The copy waits for nothing, since its source is pinned."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
