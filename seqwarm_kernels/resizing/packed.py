"""Resizes a packed batch: one row of several sequences, each of which is cut on its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.resize_batch.schema import Kind
from ..ops.resize_packed.reference import new_tokens_of, resize
from ..ops.resize_packed.schema import LACKING, PackedKind, Pieces, cut_sequences
from ..utils.checks import has_tangent
from .entry_names import own_name
from .layout import check_one_device, check_plain, is_over_pairs, row_lists
from .options import Options, fill_value
from .packing import Bounds, roles_of

_KINDS = {"positions": PackedKind.POSITION, "indices": PackedKind.INDEX, "labels": PackedKind.LABEL}
_RARE_DTYPES = {dtype for dtypes in LACKING.values() for dtype in dtypes}  #: which a backend lacks


class PackedTensor(NamedTuple):
    """A tensor of a packed batch as the operator takes it."""

    tensor: Tensor  #: (T, features...) or (N,)
    kind: PackedKind
    is_row: bool = False  #: (1, T, features...) in the batch


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
    lists = row_lists(entries, options.keys, len(bounds) - 1)
    pieces, new_bounds = cut_sequences(bounds, seq_len, rule)
    is_changed = copy or not np.array_equal(new_bounds, bounds)
    inputs = packed if is_changed else {}
    fill_values: list[float] = [0] * len(inputs)
    if rule == "reshape_overlap":  # repeats tokens
        fill_values = [
            fill_value(name, Kind.LABEL, each.tensor.dtype, pad_values, True) if each.kind == PackedKind.LABEL else 0
            for name, each in inputs.items()
        ]
    results: list[Tensor] = []
    if inputs or return_info:
        device = next(iter(packed.values())).tensor.device
        mask = _mask(entries, int(bounds[-1])) if return_info else None
        results = _run_operator(
            list(inputs.values()),
            mask,
            _on_device(pieces, device),
            int(new_bounds[-1]),
            fill_values,
            options,
            return_info,
        )
    info = [results[-3], results[-2][None], results[-1]] if return_info else []
    if not is_changed:
        return {}, info
    new_entries = _new_boundaries(entries, new_bounds)
    for (name, each), result in zip(inputs.items(), results, strict=False):
        new_entries[name] = result.unsqueeze(0) if each.is_row else result
    for name in lists:
        new_entries[name] = type(entries[name])(entries[name][index] for index in pieces[Pieces.SEQUENCE].tolist())
    return new_entries, info


def _packed_tensors(entries: Mapping[str, Any], bounds: Bounds, options: Options) -> dict[str, PackedTensor]:
    """The tensors that are resized. Position ids and sequence indices need no name in `keys`."""
    packed: dict[str, PackedTensor] = {}
    roles, tokens, sequences = roles_of(entries), int(bounds[-1]), len(bounds) - 1
    for name, role in roles.items():
        value = entries[name]
        is_named = options.keys is None or name in options.keys
        is_told = role in ("boundaries", "longest") or not (is_named or role in ("positions", "indices"))
        if is_told or not isinstance(value, Tensor) or value.dim() == 0:
            continue
        check_plain(name, value)
        if is_over_pairs(name, value, options.mask_keys):
            raise ValueError(f"batch[{name!r}] must not be a mask over pairs of tokens in a packed batch")
        kind = _KINDS.get(role, PackedKind.TOKEN)
        if value.shape[0] == tokens:
            packed[name] = PackedTensor(value, kind)
        elif value.shape[:2] == (1, tokens):
            packed[name] = PackedTensor(value.squeeze(0), kind, is_row=True)
        elif value.shape == (sequences,):
            packed[name] = PackedTensor(value, PackedKind.SEQUENCE)
        elif is_named and value.shape != (1,):
            raise ValueError(f"batch[{name!r}] must have one row of {tokens} tokens, got {tuple(value.shape)}")
    if all(each.kind == PackedKind.SEQUENCE for each in packed.values()):
        raise ValueError(f"batch must hold a tensor of the {tokens} packed tokens to resize, got {list(entries)}")
    check_one_device(each.tensor for each in packed.values())
    return packed


def _run_operator(
    packed: list[PackedTensor],
    mask: Tensor | None,
    pieces: Tensor,
    new_tokens: int,
    fill_values: list[float],
    options: Options,
    return_info: bool,
) -> list[Tensor]:
    """The new tensors, then the info."""
    tensors, kinds = [each.tensor for each in packed], [int(each.kind) for each in packed]
    rare = next((tensor.dtype for tensor in tensors if tensor.dtype in _RARE_DTYPES), None)
    backend = backends.choose("resize_packed", pieces.device.type, options.backend, rare)
    arguments = tensors, mask, pieces, new_tokens, kinds, fill_values, return_info
    results: list[Tensor] = overload("resize_packed", backend)(*arguments)
    for index, tensor in enumerate(tensors):
        # The operator carries no gradient and no tangent, its definition does.
        needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
        if needs_gradient or (tensor.is_floating_point() and has_tangent(tensor)):
            tokens = new_tokens_of(pieces, new_tokens)
            results[index] = resize(tensor, pieces, tokens, kinds[index], fill_values[index])
    return results


def _mask(entries: Mapping[str, Any], tokens: int) -> Tensor | None:
    """(tokens,): the attention mask of the packed tokens, if there is one."""
    masks = [value for name, value in entries.items() if own_name(name) == "attention_mask"]
    return next((mask.flatten() for mask in masks if isinstance(mask, Tensor) and mask.numel() == tokens), None)


def _new_boundaries(entries: Mapping[str, Any], new_bounds: Bounds) -> dict[str, Any]:
    """The new boundaries and the length of the longest sequence, where the batch holds them."""
    new_entries: dict[str, Any] = {}
    source = made = longest = None
    for name, role in roles_of(entries).items():
        value = entries[name]
        if value is None:
            continue
        if role == "boundaries":
            if value is not source:  # collators return one tensor for queries and keys
                source, made = value, _on_device(torch.from_numpy(new_bounds).to(value.dtype, copy=True), value.device)
            new_entries[name] = made
        elif role == "longest":
            longest = int((new_bounds[1:] - new_bounds[:-1]).max(initial=0)) if longest is None else longest
            new_entries[name] = torch.full_like(value, longest) if isinstance(value, Tensor) else longest
    return new_entries


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device of the batch. The copy waits for nothing, since its source is pinned."""
    if device.type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
