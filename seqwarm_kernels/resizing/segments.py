"""Keeps the shape of a batch, with entries from which the model reads where segments of the scheduled length begin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..ops.resize_batch.schema import Kind
from ..utils.checks import check_values
from .entry_names import BOUNDARIES, INDICES, LONGEST, POSITIONS, is_loss_mask, is_shifted_label, own_name
from .layout import Layout, batch_layout
from .masks import check_first_tokens, check_mask, mask_names, row_mask_name
from .options import Options, fill_value

#: The entries that FlashAttention reads in models of transformers.
_STARTS, _LONGEST = ("cu_seq_lens_q", "cu_seq_lens_k"), ("max_length_q", "max_length_k")
_INPUTS = ("input_ids", "inputs_embeds")


def keep_shape(
    entries: Mapping[str, Any], options: Options, pad_values: Mapping[str, float] | None, seq_len: int
) -> tuple[dict[str, Any], list[str], list[Any]]:
    """The entries to replace or to add, by path; the paths to remove; the fields of `ResizeInfo`.

    The host reads no value. No shape and no number depends on the length, but for `window` and `segment_length`.
    """
    options.rule()
    layout = batch_layout(entries, options._replace(mode="truncate"))
    mask, prefix = row_mask_name(entries, layout, 1), _prefix(layout)
    shape, device = (layout.batch_size, layout.source_length), entries[next(iter(layout.axes))].device
    valid = torch.ones(shape, dtype=torch.bool, device=device) if mask is None else entries[mask] != 0
    counts = valid.sum(1, dtype=torch.int32), valid.sum()
    if options.mode == "window":
        return {f"{prefix}window": seq_len - 1}, [], [counts[0], (valid.cumsum(1) - 1) * valid, counts[1]]
    _check_masks(entries, layout, mask)
    documents = _document_starts(entries, valid)
    has_even_rows = options.boundaries == "segment_length"
    if has_even_rows:
        if documents is not None:
            is_one = ~documents[:, 1:].any()
            check_values(is_one, "boundaries='segment_length' must have rows of one document, got packed ones")
        if mask is not None:
            check_first_tokens(entries[mask], f"batch[{mask!r}] must begin with a valid token for 'segment_length'")
    starts = torch.zeros_like(valid) if documents is None else documents
    starts[:, 0] = True
    if not has_even_rows:  # else padding at the end of a row is in the row's segments
        starts[:, 1:] |= valid[:, 1:] != valid[:, :-1]
    index = torch.arange(layout.source_length, device=valid.device)
    position = (index - torch.where(starts, index, 0).cummax(1).values) % seq_len
    hidden = None if mask is None else ~valid
    new_entries = _new_labels(entries, layout, options, pad_values, hidden, position == 0)
    new_entries[f"{prefix}position_ids"] = position
    new_entries |= _boundaries(entries, options, position == 0, seq_len, prefix)
    removed = [] if mask is None or has_even_rows else [mask]
    return new_entries, removed, [counts[0], position, counts[1]]


def _check_masks(entries: Mapping[str, Any], layout: Layout, mask: str | None) -> None:
    masks = mask_names(entries, layout, 1)
    over_pairs = [name for name, axes in layout.axes.items() if axes.kind == Kind.SQUARE]
    of_tokens = [name for name in layout.axes if own_name(name) == "attention_mask"]  # also one that rows share
    others = [*over_pairs, *(name for name in [*masks, *of_tokens] if name != mask)]
    if others:
        raise ValueError(f"mode='segments' needs one attention_mask (batch, sequence), got {others[0]!r}")
    if mask is not None:
        check_mask(mask, entries[mask])


def _prefix(layout: Layout) -> str:
    """The path of the container that holds the tokens, up to its last dot."""
    names = [name for name in layout.axes if own_name(name) in _INPUTS] or list(layout.axes)
    return str(names[0]).removesuffix(own_name(names[0]))


def _document_starts(entries: Mapping[str, Any], valid: Tensor) -> Tensor | None:
    """(B, S): where another document begins. As in other modes, boundaries are trusted before numbers of tokens."""
    for kind in (BOUNDARIES, INDICES, POSITIONS):
        for name, value in entries.items():
            if own_name(name) not in kind or not isinstance(value, Tensor):
                continue
            if kind is BOUNDARIES:
                starts = torch.zeros(valid.numel() + 1, dtype=torch.bool, device=valid.device)
                return starts.index_fill(0, value.long(), True)[:-1].view_as(valid)
            if value.dim() > 2:
                raise ValueError(f"mode='segments' needs batch[{name!r}] (batch, sequence), got {tuple(value.shape)}")
            step = value.diff()
            changes = step != (0 if kind is INDICES else 1)
            # Padding may have any position.
            return functional.pad(changes & valid[:, 1:] & valid[:, :-1], (1, 0))
    return None


def _new_labels(
    entries: Mapping[str, Any],
    layout: Layout,
    options: Options,
    pad_values: Mapping[str, float] | None,
    padding: Tensor | None,
    begins: Tensor,
) -> dict[str, Any]:
    """Labels without those of padding and, where the model shifts them, without the first of each segment."""
    unused = padding
    if not options.keep_first_labels:
        unused = begins if padding is None else begins | padding
    labels = [name for name, axes in layout.axes.items() if axes.kind == Kind.LABEL]
    are_shifted = any(is_shifted_label(name) for name in labels)
    new_labels = {}
    for name in labels:
        hidden = padding if is_shifted_label(name) or (are_shifted and is_loss_mask(name)) else unused
        if hidden is not None:
            fill = fill_value(name, entries[name].dtype, pad_values, fills_label=True)
            hidden = hidden.view(*hidden.shape, *[1] * (entries[name].dim() - 2))
            new_labels[name] = entries[name].masked_fill(hidden, fill)
    return new_labels


def _boundaries(
    entries: Mapping[str, Any], options: Options, begins: Tensor, seq_len: int, prefix: str
) -> dict[str, Any]:
    """The segments in other entries than position ids: for the model, and in place of the documents of the batch."""
    of_kind = {kind: [name for name in entries if own_name(name) in kind] for kind in (BOUNDARIES, INDICES, LONGEST)}
    new_entries: dict[str, Any] = {}
    for name in of_kind[INDICES]:
        numbers = (begins.cumsum(1) - 1).to(entries[name].dtype)
        new_entries[name] = numbers if entries[name].dim() > 1 else numbers[0]
    if options.boundaries == "segment_length":
        return new_entries | {f"{prefix}segment_length": seq_len}
    new_entries[f"{prefix}use_cache"] = False  # a cache makes models of transformers ignore position ids
    is_asked = options.boundaries == "cu_seq_lens"
    if is_asked or of_kind[BOUNDARIES]:
        shortest, longest = options.lengths or (seq_len, seq_len)
        rows, length = begins.shape
        known = max([0, *[len(entries[name]) - 1 for name in of_kind[BOUNDARIES]]])  # of all rows
        room = rows * (-(-length // shortest) + options.documents) + known
        numbers = torch.arange(1, room + 2, device=begins.device)
        bounds = torch.searchsorted(begins.flatten().cumsum(0), numbers, out_int32=True)
        check_values(bounds[-1] == rows * length, f"documents must be more: a batch has room for {room} segments")
        longest = min(length, longest)
        new_entries |= {name: bounds.to(entries[name].dtype) for name in of_kind[BOUNDARIES]}
        for name in of_kind[LONGEST]:
            is_tensor = isinstance(entries[name], Tensor)
            new_entries[name] = torch.full_like(entries[name], longest) if is_tensor else longest
        if is_asked:
            new_entries |= {f"{prefix}{name}": bounds for name in _STARTS}
            new_entries |= {f"{prefix}{name}": longest for name in _LONGEST}
    return new_entries
