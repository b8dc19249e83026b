"""Resizes a packed batch: one row of several sequences, each of which is cut on its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
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
from .entry_names import own_name, roles_of
from .layout import check_one_device, check_plain, is_over_pairs, row_lists
from .options import Options, fill_value
from .packing import Bounds

_KINDS = {"positions": PackedKind.POSITION, "indices": PackedKind.INDEX, "labels": PackedKind.LABEL}
_RARE_DTYPES = {dtype for dtypes in LACKING.values() for dtype in dtypes}  #: which a backend lacks


class PackedTensor(NamedTuple):
    """A tensor of a packed batch as the operator takes it."""

    tensor: Tensor  #: (T, features...) or (N,)
    kind: PackedKind
    is_row: bool = False  #: (1, T, features...) in the batch


@dataclass(eq=False)
class PackedPlan:
    """How a packed batch is resized. Made anew for each batch, whose sequences have other lengths than the last."""

    bounds: Bounds
    rule: str
    options: Options
    tensors: dict[str, PackedTensor]
    fill_values: list[float]  #: for each tensor, the value of a repeated label

    def run(
        self, entries: Mapping[str, Any], seq_len: int, copy: bool, out: Mapping[str, Tensor] | None, return_info: bool
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """As `Plan.run`. The new rows are the new sequences."""
        if out is not None:
            raise ValueError("out must be None for a packed batch, whose number of tokens depends on its sequences")
        lists = row_lists(entries, self.options.keys, len(self.bounds) - 1)
        pieces, new_bounds = cut_sequences(self.bounds, seq_len, self.rule)
        is_changed = copy or not np.array_equal(new_bounds, self.bounds)
        tensors = self.tensors if is_changed else {}
        results = self._resized(entries, list(tensors.values()), pieces, int(new_bounds[-1]), return_info)
        info = [results[-3], results[-2][None], results[-1]] if return_info else []
        if not is_changed:
            return {}, info
        new_entries = _new_boundaries(entries, new_bounds)
        for (name, each), result in zip(tensors.items(), results, strict=False):
            new_entries[name] = result.unsqueeze(0) if each.is_row else result
        for name in lists:
            new_entries[name] = type(entries[name])(entries[name][index] for index in pieces[Pieces.SEQUENCE].tolist())
        return new_entries, info

    def _resized(
        self, entries: Mapping[str, Any], packed: list[PackedTensor], pieces: Tensor, new_tokens: int, return_info: bool
    ) -> list[Tensor]:
        """The new tensors, then the info, from one call of the operator."""
        if not packed and not return_info:
            return []
        device = next(iter(self.tensors.values())).tensor.device
        tensors, kinds = [each.tensor for each in packed], [int(each.kind) for each in packed]
        mask = _mask(entries, int(self.bounds[-1])) if return_info else None
        rare = next((tensor.dtype for tensor in tensors if tensor.dtype in _RARE_DTYPES), None)
        operator = overload("resize_packed", backends.choose("resize_packed", device.type, self.options.backend, rare))
        pieces, fill_values = _on_device(pieces, device), self.fill_values[: len(tensors)]
        results: list[Tensor] = operator(tensors, mask, pieces, new_tokens, kinds, fill_values, return_info)
        for index, tensor in enumerate(tensors):
            # The operator carries no gradient and no tangent, its definition does.
            needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
            if needs_gradient or (tensor.is_floating_point() and has_tangent(tensor)):
                tokens = new_tokens_of(pieces, new_tokens)
                results[index] = resize(tensor, pieces, tokens, kinds[index], fill_values[index])
        return results


def packed_plan(
    entries: Mapping[str, Any], bounds: Bounds, options: Options, pad_values: Mapping[str, float] | None
) -> PackedPlan:
    """The plan of a packed batch.

    Raises:
        TypeError: A tensor is sparse, nested or a DTensor, or sequence indices are no integers.
        ValueError: An option does not fit a packed batch, or a tensor is not one row of its tokens.
    """
    rule = options.rule()
    if options.keep_last_token:
        raise ValueError("keep_last_token must be False for a packed batch, got True")
    tensors: dict[str, PackedTensor] = {}
    roles, tokens, sequences = roles_of(entries), int(bounds[-1]), len(bounds) - 1
    for name, role in roles.items():
        value = entries[name]
        if not isinstance(value, Tensor) or value.dim() == 0 or role in ("boundaries", "longest"):
            continue
        is_named = options.keys is None or name in options.keys
        if is_named or role in ("positions", "indices"):  # these need no name in `keys`
            check_plain(name, value)
            if is_over_pairs(name, value, options.mask_keys):
                raise ValueError(f"batch[{name!r}] must not be a mask over pairs of tokens in a packed batch")
            found = _packed_tensor(value, role, tokens, sequences)
            if found is not None:
                tensors[name] = found
            elif is_named and value.shape != (1,):
                raise ValueError(f"batch[{name!r}] must have one row of {tokens} tokens, got {tuple(value.shape)}")
    if all(each.kind == PackedKind.SEQUENCE for each in tensors.values()):
        raise ValueError(f"batch must hold a tensor of the {tokens} packed tokens to resize, got {list(entries)}")
    check_one_device({name: each.tensor for name, each in tensors.items()})
    fill_values: list[float] = [0] * len(tensors)
    if rule == "reshape_overlap":  # repeats tokens
        fill_values = [
            fill_value(name, Kind.LABEL, each.tensor.dtype, pad_values, True) if each.kind == PackedKind.LABEL else 0
            for name, each in tensors.items()
        ]
    return PackedPlan(bounds, rule, options, tensors, fill_values)


def _packed_tensor(value: Tensor, role: str, tokens: int, sequences: int) -> PackedTensor | None:
    """None for a tensor of other things than the packed tokens or sequences."""
    shape, kind = value.shape, _KINDS.get(role, PackedKind.TOKEN)
    if shape[0] == tokens:
        return PackedTensor(value, kind)
    if shape[:2] == (1, tokens):
        return PackedTensor(value.squeeze(0), kind, True)
    return PackedTensor(value, PackedKind.SEQUENCE) if shape == (sequences,) else None


def _mask(entries: Mapping[str, Any], tokens: int) -> Tensor | None:
    """(tokens,): the attention mask of the packed tokens, if there is one."""
    for name, value in entries.items():
        if own_name(name) == "attention_mask" and isinstance(value, Tensor) and value.numel() == tokens:
            return value.flatten()
    return None


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
