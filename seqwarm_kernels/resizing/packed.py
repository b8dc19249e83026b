"""Resizes a packed batch: one row of several sequences, each of which is cut on its own."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..ops import backends
from ..ops.resize_batch import validation
from ..ops.resize_batch.schema import Kind
from ..utils.checks import check_dense
from .checked_call import Options
from .packing import BOUNDARIES, INDICES, LONGEST, POSITIONS, check_mask_values, valid_tokens


class Pieces(NamedTuple):
    """The sequences of the new batch, each a piece of an old one. All tensors are (pieces,) int64, on the host."""

    sequence: Tensor  #: index of the old sequence
    source: Tensor  #: index of the first token in the old batch
    offset: Tensor  #: the same within the old sequence
    length: Tensor
    repeated: Tensor  #: number of its first tokens that the piece before it holds, too


class NewTokens(NamedTuple):
    """The tokens of the new batch. All tensors are (tokens,) int64, on the device of the batch."""

    source: Tensor  #: index in the old batch
    piece: Tensor  #: index of the piece
    slot: Tensor  #: index within the piece
    offset: Tensor  #: `Pieces.offset` of the piece
    repeated: Tensor  #: `Pieces.repeated` of the piece


@dataclass(frozen=True, eq=False)
class PackedCall:
    """Which tensors of a packed batch are resized, and how. Made by `packed_call`, valid for every length."""

    bounds: Tensor  #: (N + 1,) int64 on the host, boundaries of the sequences
    rule: str
    of_tokens: dict[str, Tensor]  #: (T, features...), views of the tensors that are resized
    of_sequences: dict[str, Tensor]  #: (N,): one entry for each sequence
    lists: dict[str, Any]  #: lists and tuples with one entry for each sequence
    fill_values: dict[str, float]  #: for each tensor of labels, the value that does not count
    valid: Tensor | None  #: (T,) bool; None if all tokens are valid

    def run(
        self, entries: Mapping[str, Any], seq_len: int, copy: bool, out: Mapping[str, Tensor] | None, return_info: bool
    ) -> tuple[dict[str, Any], tuple[int, int], list[Tensor]]:
        """As `CheckedCall.run`. The first two sizes are 1 and the number of new tokens."""
        if out is not None:
            raise ValueError("out must be None for a packed batch, whose number of tokens depends on its sequences")
        pieces = cut_sequences(self.bounds, seq_len, self.rule)
        new_bounds = functional.pad(pieces.length.cumsum(0), (1, 0))
        sizes = 1, int(new_bounds[-1])
        tokens = tokens_of(pieces, new_bounds, next(iter(self.of_tokens.values())).device)
        info = _info(tokens, new_bounds, self.valid) if return_info else []
        if not copy and new_bounds.equal(self.bounds):
            return {}, sizes, info
        new_entries = _new_boundaries(entries, new_bounds)
        for name, rows in self.of_tokens.items():
            result = self._taken(name, rows, tokens)
            new_entries[name] = result if entries[name].shape[0] == len(rows) else result[None]
        for name, tensor in self.of_sequences.items():
            new_entries[name] = tensor[pieces.sequence.to(tensor.device)]
        for name, values in self.lists.items():
            new_entries[name] = type(values)(values[sequence] for sequence in pieces.sequence.tolist())
        return new_entries, sizes, info

    def _taken(self, name: str, rows: Tensor, tokens: NewTokens) -> Tensor:
        """The new tokens of one tensor."""
        result, own = rows[tokens.source], validation.own_name(name)
        if own in POSITIONS:
            return result - _beside(tokens.offset, result).to(result.dtype)
        if own in INDICES:
            return _beside(tokens.piece, result).to(result.dtype).expand_as(result).contiguous()
        if name in self.fill_values:
            return result.masked_fill(_beside(tokens.slot < tokens.repeated, result), self.fill_values[name])
        return result


def packed_call(
    entries: Mapping[str, Any],
    bounds: Tensor,
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
    rule = validation.resizing_rule(options.mode, options.remainder, options.keep_last_token)
    if options.keep_last_token:
        raise ValueError("keep_last_token must be False for a packed batch, got True")
    backends.check_backend(options.backend)
    if options.backend not in (None, "reference"):
        raise ValueError(f"backend must be None or 'reference' for a packed batch, got {options.backend!r}")
    validation.check_seq_dim(options.seq_dim)
    validation.check_name_arguments(pad_values, keys, mask_keys)
    validation.check_keys(keys, entries)
    validation.check_names("mask_keys", mask_keys, entries)
    validation.check_names("pad_values", pad_values, entries)
    check_mask_values(entries)

    of_tokens, of_sequences = _resized_tensors(entries, bounds, keys, mask_keys)
    validation.check_one_device(of_tokens)
    fill_values = {
        name: validation.fill_value(name, Kind.LABEL, rows.dtype, pad_values, "reshape_overlap")
        for name, rows in of_tokens.items()
        if validation.is_label(name)
    }
    lists = {name: entries[name] for name in validation.row_lists(entries, keys, len(bounds) - 1)}
    valid = valid_tokens(entries, int(bounds[-1]))
    return PackedCall(bounds, rule, of_tokens, of_sequences, lists, fill_values, valid)


def _resized_tensors(
    entries: Mapping[str, Any], bounds: Tensor, keys: Collection[str] | None, mask_keys: Collection[str] | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`of_tokens` and `of_sequences` of `PackedCall`. Position ids and sequence indices need no name in `keys`."""
    tokens, sequences = int(bounds[-1]), len(bounds) - 1
    of_tokens, of_sequences = {}, {}
    for name, value in entries.items():
        own = validation.own_name(name)
        if not isinstance(value, Tensor) or value.dim() == 0 or own in BOUNDARIES or own in LONGEST:
            continue
        is_named = keys is None or name in keys
        if not is_named and own not in POSITIONS | INDICES:
            continue
        check_dense(f"batch[{name!r}]", value)
        if validation.is_square_mask(value) and validation.is_mask(name, mask_keys):
            raise ValueError(
                f"batch[{name!r}] must not be a mask over pairs of tokens in a packed batch, got {tuple(value.shape)}: "
                "leave it out, since boundaries or position ids say which tokens attend each other"
            )
        if value.shape[0] == tokens:
            of_tokens[name] = value
        elif value.shape[:2] == (1, tokens):
            of_tokens[name] = value[0]
        elif value.dim() == 1 and len(value) == sequences:
            of_sequences[name] = value
        elif is_named and value.shape != (1,):
            raise ValueError(
                f"batch[{name!r}] must have one row of {tokens} tokens, as the boundaries of the packed batch say, got "
                f"{tuple(value.shape)}; name those to resize with keys="
            )
    if not of_tokens:
        raise ValueError(f"batch must hold a tensor of the {tokens} packed tokens to resize, got {list(entries)}")
    return of_tokens, of_sequences


def cut_sequences(bounds: Tensor, seq_len: int, rule: str) -> Pieces:
    """The pieces of each sequence, in order. A sequence of at most `seq_len` tokens is one piece.

    Args:
        bounds: (N + 1,) int64, boundaries of the sequences.
        seq_len: largest number of tokens in a piece.
        rule: one of `ops.resize_batch.schema.RULES`. Pieces need no padding, so the last one is shorter under
            "reshape_pad" and "flatten".
    """
    lengths = bounds.diff()
    if rule.startswith("truncate"):
        counts = torch.ones_like(lengths)
    elif rule == "reshape_drop":
        counts = (lengths // seq_len).clamp(min=1)
    else:
        counts = ((lengths + seq_len - 1) // seq_len).clamp(min=1)
    sequence = torch.repeat_interleave(counts)
    offset = (torch.arange(len(sequence)) - (counts.cumsum(0) - counts)[sequence]) * seq_len
    left = lengths[sequence] - offset
    repeated = torch.zeros_like(left)
    if rule == "reshape_overlap":
        repeated = (seq_len - left).clamp(min=0).where(offset > 0, 0)
    offset = offset - repeated
    return Pieces(sequence, bounds[sequence] + offset, offset, (left + repeated).clamp(max=seq_len), repeated)


def tokens_of(pieces: Pieces, new_bounds: Tensor, device: torch.device) -> NewTokens:
    """Copies a table of the pieces to the device, and does not wait for results."""
    table = torch.stack([pieces.length, new_bounds[:-1], pieces.source, pieces.offset, pieces.repeated])
    length, first, source, offset, repeated = table.to(device)
    total = int(new_bounds[-1])
    piece = torch.repeat_interleave(length, output_size=total)
    slot = torch.arange(total, device=device) - first[piece]
    return NewTokens(source[piece] + slot, piece, slot, offset[piece], repeated[piece])


def _new_boundaries(entries: Mapping[str, Any], new_bounds: Tensor) -> dict[str, Any]:
    """The new boundaries and the length of the longest sequence, where the batch holds them."""
    longest = max(new_bounds.diff().tolist(), default=0)
    new_entries: dict[str, Any] = {}
    for name, value in entries.items():
        own = validation.own_name(name)
        if value is not None and own in BOUNDARIES:
            new_entries[name] = new_bounds.to(value)
        elif value is not None and own in LONGEST:
            new_entries[name] = torch.full_like(value, longest) if isinstance(value, Tensor) else longest
    return new_entries


def _beside(numbers: Tensor, tensor: Tensor) -> Tensor:
    """(tokens,) as (tokens, 1, ...), to go with a tensor (tokens, features...)."""
    return numbers.view(-1, *[1] * (tensor.dim() - 1))


def _info(tokens: NewTokens, new_bounds: Tensor, valid: Tensor | None) -> list[Tensor]:
    """valid_lengths (pieces,) int32, position_ids (1, tokens) int64, num_valid_tokens () int64."""
    kept = torch.ones_like(tokens.source, dtype=torch.bool) if valid is None else valid[tokens.source]
    counts = functional.pad(kept.cumsum(0), (1, 0))
    at_bounds = counts[new_bounds.to(counts.device)]
    positions = (counts[:-1] - at_bounds[tokens.piece]).masked_fill(~kept, 0)
    return [at_bounds.diff().to(torch.int32), positions[None], counts[-1]]
