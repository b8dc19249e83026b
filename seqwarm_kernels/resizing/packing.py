"""Recognizes packed batches: one row of several sequences, one after another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..utils.cuda import is_capturing
from .entry_names import own_name
from .masks import check_not_additive

#: Names of boundaries, (N + 1,) from 0 to the number of tokens: in transformers, flash-attention, torch, OLMo.
BOUNDARIES = frozenset(
    {"cu_seq_lens", "cu_seq_lens_q", "cu_seq_lens_k", "cu_seqlens", "cu_seqlens_q", "cu_seqlens_k"}
    | {"cu_seq_q", "cu_seq_k", "cu_doc_lens"}
)
#: Names of the number of tokens of the longest sequence.
LONGEST = frozenset(
    {"max_length_q", "max_length_k", "max_seqlen", "max_seqlen_q", "max_seqlen_k", "max_q", "max_k", "max_doc_len"}
)
POSITIONS = frozenset({"position_ids", "decoder_position_ids"})
#: Names of the number of each token's sequence.
INDICES = frozenset({"seq_idx", "sequence_id", "document_id", "document_ids", "doc_ids"})
_LENGTHS = "doc_lens"
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_BOUNDARY_DTYPES = (*INTEGERS, torch.uint16, torch.uint32, torch.uint64)

#: Names that may tell a packed batch.
PACKED_NAMES = BOUNDARIES | POSITIONS | INDICES | {_LENGTHS}

#: (N + 1,) int64, boundaries of N sequences. Of arrays this small NumPy takes a fraction of torch's time.
Bounds = NDArray[np.int64]


def packed_bounds(entries: Mapping[Any, Any], seq_dim: int) -> Bounds | None:
    """The boundaries of the sequences of a packed batch. None for other batches.

    Reads boundaries, position ids and sequence indices, and waits for their device.

    Raises:
        TypeError: Boundaries are not a tensor of integers.
        ValueError: Boundaries are not those of one row, several rows hold packed sequences, or two entries tell
            different sequences.
    """
    named = {name: own_name(name) for name, value in entries.items() if value is not None}
    named = {name: own for name, own in named.items() if own in PACKED_NAMES}
    for name, own in named.items():
        if own == _LENGTHS:
            raise ValueError(f"batch[{name!r}] must be left out: pass the boundaries of its sequences as 'cu_doc_lens'")
    boundaries = {name: entries[name] for name, own in named.items() if own in BOUNDARIES}
    found = _checked_boundaries(boundaries) if boundaries else {}
    for name in named:
        value = entries[name]
        if name not in boundaries and isinstance(value, Tensor) and value.dim() in (1, 2) and value.numel():
            bounds = _bounds_of_numbers(name, value, entries, seq_dim)
            if bounds is not None and not (boundaries and _tells_nothing(bounds)):
                found[name] = bounds
    _check_agreement(found, entries)
    is_flat = any(entries[name].dim() == 1 for name in found)  # boundaries are 1-D, too
    for name, bounds in found.items():
        if not boundaries and _tells_nothing(bounds):
            raise ValueError(
                f"batch[{name!r}] must not make each of {len(bounds) - 1} tokens a sequence of its own: leave it out, "
                "or add boundaries such as 'cu_seqlens'"
            )
        if is_flat or len(bounds) > 2:
            return bounds
    return None


def check_mask_values(entries: Mapping[Any, Any]) -> None:
    """An attention mask of integers in host memory must be 0 or 1.

    Greater numbers would tell packed sequences, and negative ones hide tokens that 0 keeps.
    """
    for name, mask in entries.items():
        if not own_name(name).endswith("attention_mask") or not isinstance(mask, Tensor) or not mask.numel():
            continue
        is_readable = type(mask) is Tensor and mask.is_cpu and not torch.compiler.is_compiling()
        if not is_readable or mask.dtype not in INTEGERS:
            continue
        check_not_additive(name, mask)
        if mask.max() > 1:
            raise ValueError(
                f"batch[{name!r}] must hold 0 and 1, got {int(mask.max())}: pass the numbers of packed sequences as "
                "'seq_idx'"
            )


def packed_mask(entries: Mapping[Any, Any], tokens: int) -> Tensor | None:
    """(tokens,): the attention mask. None without a mask of the packed tokens."""
    for name, value in entries.items():
        if own_name(name) == "attention_mask" and isinstance(value, Tensor) and value.numel() == tokens:
            return value.flatten()
    return None


def _checked_boundaries(boundaries: Mapping[str, Any]) -> dict[str, Bounds]:
    """One of the boundaries, which all are equal."""
    found: dict[str, Bounds] = {}
    for name, value in boundaries.items():
        if not isinstance(value, Tensor) or value.dtype not in _BOUNDARY_DTYPES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"batch[{name!r}] must be a tensor of integers, the boundaries of sequences, got {kind}")
        if value.dim() != 1 or not len(value):
            raise ValueError(
                f"batch[{name!r}] must be the boundaries of sequences in one row, (sequences + 1,), got "
                f"{tuple(value.shape)}"
            )
        found[name] = _host_array(value)
    (name, bounds), *others = found.items()
    for other, values in others:
        if not np.array_equal(values, bounds):
            raise ValueError(
                f"batch[{other!r}] must equal batch[{name!r}]: sequences whose queries and keys have other boundaries "
                "cannot be resized"
            )
    if bounds[0] != 0 or (bounds[1:] < bounds[:-1]).any():
        raise ValueError(f"batch[{name!r}] must begin with 0 and not fall, got {bounds.tolist()}")
    return {name: bounds}


def _bounds_of_numbers(name: str, values: Tensor, entries: Mapping[Any, Any], seq_dim: int) -> Bounds | None:
    """The boundaries where position ids restart at 0 or sequence indices change. None for several rows."""
    is_of_rows, is_index = values.dim() == 1 and not _is_of_tokens(values, entries), own_name(name) in INDICES
    if values.device.type == "meta" or (is_of_rows and is_index):
        return None
    # in 8 bits numbers that wrap would follow each other
    rows, mask = _as_rows(values.long() if values.dtype in INTEGERS else values, seq_dim), None
    if not is_index:
        mask = entries.get(f"{name.removesuffix('position_ids')}attention_mask")
        mask = _as_rows(mask, seq_dim) if isinstance(mask, Tensor) and mask.shape == values.shape else None
    if len(rows) == 1 and mask is None and values.dtype in INTEGERS and not _is_in_graph(values):
        numbers = _host_array(rows[0])
        changes = numbers[1:] - numbers[:-1]
        starts = (changes != (0 if is_index else 1)).nonzero()[0] + 1
    else:
        is_start = rows.diff(dim=1) != 0 if is_index else _starts_anew(rows, mask)
        if _is_in_graph(values):
            torch._assert_async(~is_start.any(), f"{name} holds packed sequences: resize them outside of the graph")
            return None
        if len(rows) > 1:
            _check_one_sequence_each(name, is_start)
            return None
        starts = _host_array(is_start[0]).nonzero()[0] + 1
    if is_of_rows and not len(starts):
        return None
    return np.concatenate(([0], starts, [rows.numel()]))


def _host_array(numbers: Tensor) -> NDArray[np.int64]:
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        # Tensors may have no values or no storage. A trace refuses `item`, and would not see other ways to read.
        return np.array([number.item() for number in numbers], np.int64)
    array: NDArray[np.int64] = numbers.numpy(force=True).astype(np.int64, copy=False)
    return array


def _is_of_tokens(numbers: Tensor, entries: Mapping[Any, Any]) -> bool:
    """Whether 1-D numbers belong to the tokens of one row, rather than to the rows or to the columns of a batch."""
    length, has_tokens = len(numbers), False
    for name, value in entries.items():
        if not isinstance(value, Tensor) or value.dim() == 0 or own_name(name) in PACKED_NAMES:
            continue
        is_row = value.dim() > 1 and len(value) == 1
        is_of_rows = len(value) == length and not value.is_floating_point()
        if value.dim() > 1 and not is_row and (value.shape[1] == length or is_of_rows):
            return False
        has_tokens |= value.shape[is_row] == length
    return has_tokens and length > 1


def _is_in_graph(tensor: Tensor) -> bool:
    """Whether values cannot be read, because a graph is compiled or captured."""
    return torch.compiler.is_compiling() or is_capturing(tensor.device)


def _check_one_sequence_each(name: str, is_start: Tensor) -> None:
    if is_start.any():
        row = int(is_start.any(dim=1).nonzero()[0])
        raise ValueError(
            f"batch[{name!r}] must hold one sequence in each of its {len(is_start)} rows, got several in row {row}: "
            "pack the sequences of all rows into one row, or mark padding in an attention_mask"
        )


def _tells_nothing(bounds: Bounds) -> bool:
    """Whether each token is a sequence of its own, as with position ids that are all 0."""
    return len(bounds) > 2 and len(bounds) - 1 == int(bounds[-1])


def _check_agreement(found: Mapping[str, Bounds], entries: Mapping[Any, Any]) -> None:
    """All boundaries must tell the same sequences of valid tokens. Sequences without tokens do not count.

    Between masked tokens, position ids do not tell all sequences: they may rise from one to the next.
    """
    name = max(found, key=lambda name: len(found[name]), default="")
    others = {other: bounds for other, bounds in found.items() if not np.array_equal(bounds, found[name])}
    if not others:
        return
    bounds = found[name]
    mask = packed_mask(entries, int(bounds[-1]))
    kept = slice(None) if mask is None else _host_array(mask != 0).astype(bool)
    starts = _starts(bounds, kept)
    for other, values in others.items():
        has_other_tokens = values[-1] != bounds[-1]
        if has_other_tokens and len(values) == 2:  # one sequence, as of an encoder beside a packed decoder
            continue
        is_start = None if has_other_tokens else _starts(values, kept)
        if is_start is not None and own_name(other) in POSITIONS and len(starts) + 1 < int(bounds[-1]):
            is_start = is_start | starts
        if is_start is None or not np.array_equal(starts, is_start):
            raise ValueError(
                f"batch[{other!r}] must tell the same sequences as batch[{name!r}], got the boundaries "
                f"{values.tolist()} and {bounds.tolist()}"
            )


def _starts(bounds: Bounds, kept: Any) -> NDArray[np.bool_]:
    """Of all kept tokens but the first: whether the one before belongs to another sequence."""
    sequence = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))[kept]
    return sequence[1:] != sequence[:-1]


def _as_rows(values: Tensor, seq_dim: int) -> Tensor:
    """(B, S) of (B, S), of (S, B) or of (S,)."""
    if values.dim() == 1:
        return values[None]
    return values if seq_dim == 1 else values.T


def _starts_anew(positions: Tensor, mask: Tensor | None) -> Tensor:
    """(B, S - 1): whether a token's position does not follow that of the token before it.

    In a row with masked tokens, it must only be larger than that of the valid token before it.
    """
    follows_not = positions.diff(dim=1) != 1  # as transformers finds packed sequences
    if mask is None:
        return follows_not
    valid = mask != 0
    columns = torch.arange(positions.shape[1], device=positions.device)
    before = columns.where(valid, -1).cummax(dim=1).values[:, :-1]
    falls = positions[:, 1:] <= positions.gather(1, before.clamp(min=0))
    return torch.where(valid.all(dim=1, keepdim=True), follows_not, falls & valid[:, 1:] & (before >= 0))
