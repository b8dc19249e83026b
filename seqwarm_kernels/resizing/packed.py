"""Resizes a packed batch: one row of several sequences, each of which is cut on its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.resize_batch.schema import Kind
from ..ops.resize_packed.reference import new_tokens_of, resize
from ..ops.resize_packed.schema import LACKING, PackedKind, Pieces, cut_sequences
from ..utils.checks import check_dense, has_tangent
from .checked_call import Options, rare_dtype
from .entry_names import is_filled, is_mask, own_name, warn_of_counts
from .layout import check_one_device, fill_value, is_square_mask, row_lists
from .options import check_keys, check_name_arguments, check_names, check_seq_dim, resizing_rule
from .packing import BOUNDARIES, INDICES, INTEGERS, LONGEST, POSITIONS, Bounds, check_mask_values, packed_mask


@dataclass(frozen=True, eq=False)
class PackedCall:
    """Which tensors of a packed batch are resized, and how. Made by `packed_call`, valid for every length."""

    bounds: Bounds
    rule: str
    tensors: dict[str, Tensor]  #: those that are resized as the operator takes them, (T, features...) or (N,)
    kinds: list[int]  #: a `PackedKind` for each tensor
    fill_values: list[float]  #: for each tensor, the value of a repeated label
    lists: dict[str, Any]  #: lists and tuples with one entry for each sequence
    mask: Tensor | None  #: (T,); None if all tokens are valid
    backend: str | None

    def run(
        self, entries: Mapping[str, Any], seq_len: int, copy: bool, out: Mapping[str, Tensor] | None, return_info: bool
    ) -> tuple[dict[str, Any], tuple[int, int], list[Tensor]]:
        """As `CheckedCall.run`. The first two sizes are 1 and the number of new tokens."""
        if out is not None:
            raise ValueError("out must be None for a packed batch, whose number of tokens depends on its sequences")
        pieces, new_bounds = cut_sequences(self.bounds, seq_len, self.rule)
        new_tokens = int(new_bounds[-1])
        self._check_indices(len(new_bounds) - 1)
        unchanged = not copy and np.array_equal(new_bounds, self.bounds)
        new_entries = {} if unchanged else _new_boundaries(entries, new_bounds)
        tensors = [] if unchanged else [*self.tensors.values()]
        results: list[Tensor] = []
        if tensors or return_info:
            device = next(iter(self.tensors.values())).device
            results = self._resized(tensors, pieces, new_tokens, device, return_info)
        info = [results[-3], results[-2][None], results[-1]] if return_info else []
        if not unchanged:
            for (name, tensor), result in zip(self.tensors.items(), results, strict=False):
                new_entries[name] = result if entries[name].dim() == tensor.dim() else result[None]
            for name, values in self.lists.items():
                new_entries[name] = type(values)(values[sequence] for sequence in pieces[Pieces.SEQUENCE].tolist())
        return new_entries, (1, new_tokens), info

    def _check_indices(self, pieces: int) -> None:
        for (name, tensor), kind in zip(self.tensors.items(), self.kinds, strict=True):
            if kind == PackedKind.INDEX and pieces - 1 > torch.iinfo(tensor.dtype).max:
                raise ValueError(
                    f"batch[{name!r}] must be of a dtype that holds the numbers of {pieces} new sequences, such as "
                    f"torch.int32, got {tensor.dtype}"
                )

    def _resized(
        self, tensors: list[Tensor], pieces: Tensor, new_tokens: int, device: torch.device, return_info: bool
    ) -> list[Tensor]:
        """The new tensors, then the info, from one call of the operator."""
        pieces = _on_device(pieces, device)
        kinds, fill_values = self.kinds[: len(tensors)], self.fill_values[: len(tensors)]
        dtype = rare_dtype([tensor.dtype for tensor in tensors], LACKING)
        operator = overload("resize_packed", backends.choose("resize_packed", device.type, self.backend, dtype))
        results: list[Tensor] = operator(tensors, self.mask, pieces, new_tokens, kinds, fill_values, return_info)
        for index, tensor in enumerate(tensors):
            # The operator carries no gradient and no tangent, its definition does.
            if has_tangent(tensor) or (tensor.requires_grad and torch.is_grad_enabled()):
                tokens = new_tokens_of(pieces, new_tokens)
                results[index] = resize(tensor, pieces, tokens, kinds[index], fill_values[index])
        return results


def packed_call(
    entries: Mapping[str, Any],
    bounds: Bounds,
    options: Options,
    pad_values: Mapping[str, float] | None,
    keys: Collection[str] | None,
    mask_keys: Collection[str] | None,
) -> PackedCall:
    """The checked call for a packed batch.

    Raises:
        TypeError: An argument has the wrong type, or a tensor is sparse or nested.
        ValueError: An argument does not fit a packed batch, or a tensor is not one row of its tokens.
    """
    rule = resizing_rule(options.mode, options.remainder, options.keep_last_token)
    if options.keep_last_token:
        raise ValueError("keep_last_token must be False for a packed batch, got True")
    backends.check_backend(options.backend)
    check_seq_dim(options.seq_dim)
    check_name_arguments(pad_values, keys, mask_keys)
    check_keys(keys, entries)
    check_names("mask_keys", mask_keys, entries)
    check_names("pad_values", pad_values, entries)
    check_mask_values(entries)

    found = _resized_tensors(entries, bounds, keys, mask_keys)
    tensors = {name: tensor for name, (tensor, _) in found.items()}
    check_one_device(tensors)
    if not torch.compiler.is_compiling():
        warn_of_counts(name for name, (_, kind) in found.items() if kind == PackedKind.SEQUENCE)
    return PackedCall(
        bounds=bounds,
        rule=rule,
        tensors=tensors,
        kinds=[int(kind) for _, kind in found.values()],
        fill_values=[
            fill_value(name, Kind.LABEL, tensor.dtype, pad_values, rule == "reshape_overlap")
            if kind == PackedKind.LABEL
            else 0
            for name, (tensor, kind) in found.items()
        ],
        lists={name: entries[name] for name in row_lists(entries, keys, len(bounds) - 1)},
        mask=packed_mask(entries, int(bounds[-1])),
        backend=options.backend,
    )


def _resized_tensors(
    entries: Mapping[str, Any], bounds: Bounds, keys: Collection[str] | None, mask_keys: Collection[str] | None
) -> dict[str, tuple[Tensor, PackedKind]]:
    """The tensors as the operator takes them. Position ids and sequence indices need no name in `keys`."""
    tokens, sequences = int(bounds[-1]), len(bounds) - 1
    found: dict[str, tuple[Tensor, PackedKind]] = {}
    for name, value in entries.items():
        own = own_name(name)
        if not isinstance(value, Tensor) or value.dim() == 0 or own in BOUNDARIES or own in LONGEST:
            continue
        is_named = keys is None or name in keys
        if not is_named and own not in POSITIONS | INDICES:
            continue
        check_dense(f"batch[{name!r}]", value)
        if is_square_mask(value) and is_mask(name, mask_keys):
            raise ValueError(
                f"batch[{name!r}] must not be a mask over pairs of tokens in a packed batch, got {tuple(value.shape)}: "
                "leave it out, since boundaries or position ids say which tokens attend each other"
            )
        if value.shape[0] == tokens:
            found[name] = value, _kind_of(name, value)
        elif value.shape[:2] == (1, tokens):
            found[name] = value[0], _kind_of(name, value)
        elif value.dim() == 1 and len(value) == sequences:
            found[name] = value, PackedKind.SEQUENCE
        elif is_named and value.shape != (1,):
            raise ValueError(
                f"batch[{name!r}] must have one row of {tokens} tokens, as the boundaries of the packed batch say, got "
                f"{tuple(value.shape)}; name those to resize with keys="
            )
    if all(kind == PackedKind.SEQUENCE for _, kind in found.values()):
        raise ValueError(f"batch must hold a tensor of the {tokens} packed tokens to resize, got {list(entries)}")
    return found


def _kind_of(name: str, tensor: Tensor) -> PackedKind:
    """The kind of a tensor of tokens."""
    own = own_name(name)
    if own in POSITIONS:
        return PackedKind.POSITION
    if own in INDICES:
        if tensor.dtype not in INTEGERS:
            raise TypeError(f"batch[{name!r}] must hold integers, the numbers of sequences, got {tensor.dtype}")
        return PackedKind.INDEX
    return PackedKind.LABEL if is_filled(name, tensor.dtype) else PackedKind.TOKEN


def _new_boundaries(entries: Mapping[str, Any], new_bounds: Bounds) -> dict[str, Any]:
    """The new boundaries and the length of the longest sequence, where the batch holds them."""
    longest = int((new_bounds[1:] - new_bounds[:-1]).max(initial=0))
    new_entries: dict[str, Any] = {}
    for name, value in entries.items():
        own = own_name(name)
        if value is not None and own in BOUNDARIES:
            if new_bounds[-1] > torch.iinfo(value.dtype).max:  # remainder="overlap" repeats tokens
                raise ValueError(
                    f"batch[{name!r}] must be of a dtype that holds the {new_bounds[-1]} new tokens, such as "
                    f"torch.int32, got {value.dtype}"
                )
            new_entries[name] = _on_device(torch.tensor(new_bounds, dtype=value.dtype, device="cpu"), value.device)
        elif value is not None and own in LONGEST:
            new_entries[name] = torch.full_like(value, longest) if isinstance(value, Tensor) else longest
    return new_entries


def _on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device of the batch. The copy waits for nothing, since its source is pinned."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
