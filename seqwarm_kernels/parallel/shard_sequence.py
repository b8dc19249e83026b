"""This rank's part of a batch: some tokens of every row, or some of the rows."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ..ops.resize_batch.schema import IGNORED_LABEL, Kind
from ..resizing.containers import flatten_batch, unflatten_batch
from ..resizing.entry_names import BOUNDARIES, INDICES, LONGEST, POSITIONS, is_label, own_name
from ..resizing.functional import resize_batch
from ..resizing.layout import Layout, batch_layout, check_names, row_lists
from ..resizing.masks import row_mask_name
from ..resizing.options import Options
from ..resizing.packing import Bounds, packed_bounds
from ..utils.checks import check_bool
from ..utils.modules import CONTEXT_PART, NUM_ITEMS_IN_BATCH
from .checks import check_mesh, check_parts

_LABELS, _SHIFTED = "labels", "shift_labels"
_MULTIPLIER = 0x1E3779B97F4A7C15  #: spreads the bits of a checksum
_PADDED_MULTIPLE = 4  #: of the tokens of a rank where a batch is padded, for dropout


def shard_sequence(
    batch: Any,
    mesh: DeviceMesh,
    seq_len: int | None = None,
    *,
    by: str = "tokens",
    shift_labels: bool = True,
    keys: Collection[str] | None = None,
) -> Any:
    """Take this rank's part of a batch that all ranks of `mesh` hold: a contiguous part of the tokens of every row.

    Labels are shifted before: the last token of a rank predicts the first token of the next rank. A batch with "labels"
    (B, S) gets two entries, which the causal language models of transformers take:

    - "shift_labels": at each token the label of the next one, −100 at the end of a row. "labels" are not shifted.
    - "num_items_in_batch": the labels of the whole batch over the number of ranks. A model divides its sum of losses by
      it, so the mean of the ranks' losses is the loss of the whole batch. It replaces an entry of this name.

    A loss of your own sums over its tokens and divides by "num_items_in_batch". Pass shift_labels=False, and count the
    labels before, if labels are shifted already or belong to their own token, as for masked language models.

    Rows with an "attention_mask" are padded to a multiple of 4 · P tokens, which dropout needs: zeros, which the mask
    leaves out, with label −100. So are packed batches, with tokens of no sequence. They keep the boundaries of all
    ranks' tokens. If only position ids or indices tell them, "cu_seq_lens_q" and so on are added.

    A mutable mapping also gets "context_part", which is `by`: a model with `ContextParallel` takes it.

    Args:
        batch: As for `resize_batch`, the same on all P ranks of the mesh. It is not changed.
        mesh: One dimension, that of `ContextParallel`.
        seq_len: Truncate rows to this length before. Resize in other ways with `resize_batch` or
            `SequenceLengthScheduler.resize` before.
        by: "tokens", or "rows": each rank gets B / P whole rows. Choose rows where P divides B, as in a batch that was
            reshaped to short rows: a rank has as many tokens, and exchanges none.
        shift_labels: Add the two entries.
        keys: As for `resize_batch`: the tensors to shard. Default: all.

    Returns:
        A batch of the same type. Tensors without a sequence dimension are whole, except by rows.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: P does not divide the rows, or the length of rows without an "attention_mask"; an entry has several
            sequence dimensions, labels are those of rows, or a packed batch is sharded by rows.
        RuntimeError: The ranks hold different batches.
    """
    check_mesh(mesh)
    check_parts(by)
    check_bool("shift_labels", shift_labels)
    keys = None if keys is None else tuple(keys)
    if seq_len is not None:
        batch = resize_batch(batch, seq_len, keys=keys, copy=False)
    entries = flatten_batch(batch)
    check_names("keys", keys, entries)
    bounds = packed_bounds(entries, 1)
    added = dict(_added(batch, entries, bounds, mesh.size(), shift_labels))
    entries = {**entries, **added}
    keys = None if keys is None else {*keys, *(name for name in added if name == _SHIFTED)}
    _check_equal(entries, mesh)
    if bounds is None:
        parts = dict(_parts_of_rows(entries, mesh, by, keys))
    elif by == "tokens":
        parts = dict(_parts_of_packed(entries, bounds, mesh, keys))
    else:
        raise ValueError("by must be 'tokens' for a packed batch, which is one row, got 'rows'")
    if isinstance(batch, MutableMapping):
        batch = copy.copy(batch)
        for name in added:
            batch[name] = parts.get(name, added[name])
        batch[CONTEXT_PART] = by
    return unflatten_batch(batch, parts)


def _added(
    batch: Any, entries: Mapping[Any, Any], bounds: Bounds | None, size: int, shift_labels: bool
) -> Iterator[tuple[str, Any]]:
    """The entries that the batch lacks: shifted labels and their number, and boundaries."""
    if shift_labels:
        _check_label_names(entries)
    labels = entries.get(_LABELS) if shift_labels and _SHIFTED not in entries else None
    lacks_bounds = bounds is not None and not any(own_name(name) in BOUNDARIES for name in entries)
    is_extended = labels is not None or lacks_bounds or (shift_labels and _SHIFTED in entries)
    if is_extended and not isinstance(batch, MutableMapping):
        raise TypeError(f"batch must be a mapping to take more entries, got {type(batch).__name__}")
    if isinstance(labels, Tensor):
        if labels.dim() == 1 and bounds is None:
            raise ValueError(
                f"batch['labels'] must be (rows, tokens), got {tuple(labels.shape)}: pass shift_labels=False and "
                'by="rows" for labels of rows'
            )
        entries = {**entries, _SHIFTED: _shifted(labels)}
        yield _SHIFTED, entries[_SHIFTED]
    if shift_labels and isinstance(entries.get(_SHIFTED), Tensor):
        yield NUM_ITEMS_IN_BATCH, (entries[_SHIFTED] != IGNORED_LABEL).sum() / size
    if bounds is not None and lacks_bounds:
        boundaries = torch.tensor(bounds, dtype=torch.int32, device=_device(entries))
        longest = int(np.diff(bounds).max())
        yield from {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}.items()
        yield from {"max_length_q": longest, "max_length_k": longest}.items()


def _check_label_names(entries: Mapping[Any, Any]) -> None:
    for name, value in entries.items():
        if isinstance(value, Tensor) and is_label(name) and name not in (_LABELS, _SHIFTED):
            raise ValueError(
                f"batch must have its labels as 'labels' to shift them, got {name!r}: pass shift_labels=False, with "
                "labels that are those of their own tokens"
            )


def _shifted(labels: Tensor) -> Tensor:
    """At each token the label of the next one. As in one process, collators ignore the first label of a sequence."""
    return functional.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]


def _check_equal(entries: Mapping[Any, Any], mesh: DeviceMesh) -> None:
    """Assert, without waiting for the device, that all ranks hold the same tensors, by a checksum."""
    total = torch.zeros((), dtype=torch.int64, device=mesh.device_type)
    for number, tensor in enumerate(_tensors(entries), start=1):
        contents = tensor.contiguous().flatten()
        if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
            contents = contents.view(torch.uint8)
        mixed = (contents + torch.arange(contents.numel(), device=tensor.device)) * _MULTIPLIER  # wraps
        mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
        total = total + number * (tensor.numel() + (mixed ^ (mixed >> 32)).sum()).to(total.device)
    largest, smallest = collectives.all_reduce(torch.stack([total, -total]), "max", mesh)
    torch._assert_async(
        largest == -smallest,
        "batch must be the same on all ranks of mesh: give the ranks of a context-parallel group the same data, with "
        "samplers whose rank and number of replicas count the groups",
    )


def _tensors(entries: Mapping[Any, Any]) -> Iterator[Tensor]:
    for value in entries.values():
        if isinstance(value, Tensor) and value.dim():
            yield value


def _parts_of_rows(
    entries: Mapping[Any, Any], mesh: DeviceMesh, by: str, keys: Collection[str] | None
) -> Iterator[tuple[str, Any]]:
    layout = batch_layout(entries, Options(keys=keys))
    if by == "tokens":
        yield from _tokens_of_rows(entries, layout, mesh)
        return
    rank, size, count = mesh.get_local_rank(), mesh.size(), layout.batch_size
    if count % size:
        raise ValueError(f"batch must have a multiple of {size} rows, one part for each rank of mesh, got {count}")
    rows = count // size
    lists = row_lists(entries, keys, count)
    for name, value in entries.items():
        dim = layout.axes[name].rows if name in layout.axes else 0  # position ids may be (3, B, S)
        if isinstance(value, Tensor) and dim is not None and value.shape[dim : dim + 1] == (count,):
            yield name, value.narrow(dim, rank * rows, rows).contiguous()
        elif name in lists:
            yield name, value[rank * rows : (rank + 1) * rows]


def _tokens_of_rows(entries: Mapping[Any, Any], layout: Layout, mesh: DeviceMesh) -> Iterator[tuple[str, Tensor]]:
    length, size = layout.source_length, mesh.size()
    mask = row_mask_name({name: entries[name] for name in layout.axes}, layout, 1)
    if length % size and mask is None:
        raise ValueError(
            f"batch must have a multiple of {size} tokens in a row, one part for each rank of mesh, or an "
            f"'attention_mask' to be padded, got {length} tokens"
        )
    tokens = _tokens_with_padding(length, size) if mask is not None else length // size
    for name, axes in layout.axes.items():
        if axes.kind == Kind.SQUARE:
            raise ValueError(
                f"batch[{name!r}] must have one sequence dimension, got {tuple(entries[name].shape)}: pass a mask "
                "(rows, tokens)"
            )
        if axes.kind != Kind.ROW:
            yield name, _tokens_of_rank(name, entries[name], axes.tokens[0], tokens, mesh)


def _tokens_with_padding(length: int, size: int) -> int:
    """The tokens of each rank, if the ranks' tokens are padded."""
    return -(-length // (_PADDED_MULTIPLE * size)) * _PADDED_MULTIPLE


def _tokens_of_rank(name: str, value: Tensor, dim: int, tokens: int, mesh: DeviceMesh) -> Tensor:
    """This rank's `tokens` of a tensor, which is padded at its end."""
    padding = [0, 0] * (value.dim() - dim - 1) + [0, tokens * mesh.size() - value.shape[dim]]
    padded = functional.pad(value, padding, value=IGNORED_LABEL if is_label(name) and value.dtype.is_signed else 0)
    return padded.narrow(dim, mesh.get_local_rank() * tokens, tokens).contiguous()


def _parts_of_packed(
    entries: Mapping[Any, Any], bounds: Bounds, mesh: DeviceMesh, keys: Collection[str] | None
) -> Iterator[tuple[str, Any]]:
    total = int(bounds[-1])
    names = {name: value for name, value in entries.items() if own_name(name) not in BOUNDARIES | LONGEST}
    if not any(isinstance(value, Tensor) and total in value.shape[:2] for value in names.values()):
        raise ValueError(f"batch must hold the {total} tokens up to the last boundary, and no others")
    tokens = _tokens_with_padding(total, mesh.size())
    for name, value in names.items():
        if not isinstance(value, Tensor):
            continue
        if keys is not None and name not in keys and own_name(name) not in POSITIONS | INDICES:
            continue
        dim = 1 if value.shape[:2] == (1, total) else 0 if value.shape[:1] == (total,) else None
        if dim is not None:
            yield name, _tokens_of_rank(name, value, dim, tokens, mesh)


def _device(entries: Mapping[Any, Any]) -> torch.device:
    return next(value.device for value in entries.values() if isinstance(value, Tensor) and value.dim())
