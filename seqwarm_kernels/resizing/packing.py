"""Recognizes packed batches: one row of several sequences, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..ops.resize_batch.validation import own_name

#: Names of boundaries, (N + 1,) from 0 to the number of tokens: in transformers, flash-attention, torch's varlen_attn.
BOUNDARIES = frozenset(
    {"cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "cu_seq_q", "cu_seq_k"}
)
#: Names of the number of tokens of the longest sequence.
LONGEST = frozenset({"max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k"})
POSITIONS, INDICES = "position_ids", "seq_idx"

#: Names that may tell a packed batch.
PACKED_NAMES = BOUNDARIES | {POSITIONS, INDICES}


def packed_bounds(entries: Mapping[Any, Any], seq_dim: int) -> Tensor | None:
    """The boundaries of the sequences of a packed batch, (N + 1,) int64 in host memory. None for other batches.

    Reads boundaries, or else position ids and sequence indices, and waits for their device.

    Raises:
        TypeError: Boundaries are not a tensor of integers.
        ValueError: Boundaries are not those of one row, or several rows hold packed sequences.
    """
    names = [name for name in entries if own_name(name) in PACKED_NAMES]
    boundaries = {name: entries[name] for name in names if own_name(name) in BOUNDARIES and entries[name] is not None}
    if boundaries:
        return _checked_boundaries(boundaries)
    for name in names:
        value = entries[name]
        if isinstance(value, Tensor) and value.dim() in (1, 2) and value.device.type != "meta":
            bounds = _bounds_of_starts(name, value, entries, seq_dim)
            if bounds is not None:
                return bounds
    return None


def _checked_boundaries(boundaries: Mapping[str, Any]) -> Tensor:
    found: dict[str, Tensor] = {}
    for name, value in boundaries.items():
        if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"batch[{name!r}] must be a tensor of integers, the boundaries of sequences, got {kind}")
        if value.dim() != 1 or not len(value):
            raise ValueError(
                f"batch[{name!r}] must be the boundaries of sequences in one row, (sequences + 1,), got "
                f"{tuple(value.shape)}"
            )
        found[name] = value.to("cpu", torch.int64)
    (name, bounds), *others = found.items()
    for other, values in others:
        if not values.equal(bounds):
            raise ValueError(
                f"batch[{other!r}] must equal batch[{name!r}]: sequences whose queries and keys have other boundaries "
                "cannot be resized"
            )
    if bounds[0] != 0 or (bounds.diff() < 0).any():
        raise ValueError(f"batch[{name!r}] must begin with 0 and not fall, got {bounds.tolist()}")
    return bounds


def _bounds_of_starts(name: str, values: Tensor, entries: Mapping[Any, Any], seq_dim: int) -> Tensor | None:
    """The boundaries where position ids start anew or sequence indices change. None if they do nowhere."""
    if own_name(name) == INDICES:
        is_start = _as_rows(values, seq_dim).diff(dim=1) != 0
    else:
        mask = entries.get(f"{name.removesuffix(POSITIONS)}attention_mask")
        if not isinstance(mask, Tensor) or mask.shape != values.shape:
            mask = None
        is_start = _starts_anew(_as_rows(values, seq_dim), None if mask is None else _as_rows(mask, seq_dim))
    if torch.compiler.is_compiling() or (values.is_cuda and torch.cuda.is_current_stream_capturing()):
        torch._assert_async(~is_start.any(), f"{name} holds packed sequences: resize them outside of the graph")
        return None
    if len(is_start) == 1:
        starts = is_start[0].nonzero()[:, 0].cpu() + 1
        length = is_start.shape[1] + 1
        return torch.cat([torch.tensor([0]), starts, torch.tensor([length])]) if len(starts) else None
    if is_start.any():
        row = int(is_start.any(dim=1).nonzero()[0])
        raise ValueError(
            f"batch[{name!r}] must hold one sequence in each of its {len(is_start)} rows, got several in row {row}: "
            "pack the sequences of all rows into one row, or mark padding in an attention_mask"
        )
    return None


def _as_rows(values: Tensor, seq_dim: int) -> Tensor:
    """(B, S) of (B, S), of (S, B) or of (S,)."""
    if values.dim() == 1:
        return values[None]
    return values if seq_dim == 1 else values.T


def _starts_anew(positions: Tensor, mask: Tensor | None) -> Tensor:
    """(B, S - 1): whether a token's position does not follow that of the token before it.

    With a mask, which may hide any tokens, it must only be larger than that of the valid token before it.
    """
    if mask is None:
        return positions.diff(dim=1) != 1  # as transformers finds packed sequences
    valid = mask != 0
    columns = torch.arange(positions.shape[1], device=positions.device)
    before = columns.where(valid, -1).cummax(dim=1).values[:, :-1]
    falls = positions[:, 1:] <= positions.gather(1, before.clamp(min=0))
    return falls & valid[:, 1:] & (before >= 0)
