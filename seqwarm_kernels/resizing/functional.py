"""What: make this batch that long."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.resize_batch import validation
from ..ops.resize_batch.schema import INFO_DTYPES, SEQUENCE_DIMS, Kind
from ..utils.checks import check_int
from .buffers import BatchBuffers
from .checked_call import Options, Recipe, recipe_for
from .containers import leaves, replaced


class ResizeInfo(NamedTuple):
    """What a resized batch holds. A token is valid where the attention mask is not 0; all are without a mask."""

    valid_lengths: Tensor  #: (rows,) int32, valid tokens of each new row
    position_ids: Tensor  #: (rows, seq_len) int64, valid tokens before this one in its new row; 0 if not valid
    num_valid_tokens: Tensor  #: () int64, on the batch's device


def resize_batch(
    batch: Any,
    seq_len: int,
    *,
    mode: str = "truncate",
    remainder: str = "drop",
    seq_dim: int = 1,
    pad_values: Mapping[str, float] | None = None,
    keep_last_token: bool = False,
    keys: Collection[str] | None = None,
    mask_keys: Collection[str] | None = None,
    copy: bool = True,
    out: Mapping[str, Tensor] | None = None,
    return_info: bool = False,
    backend: str | None = None,
) -> Any:
    """Cut every tensor of `batch` to rows of `seq_len` tokens. The input stays as it is.

    Tensors with two or more dimensions are (B, S) or (B, S, features...) and agree on B and S. A (B, S, S) or
    (B, 1, S, S) tensor that is a mask by name loses both sequence dimensions. A 1-D tensor holds one entry for
    each row, and so does a list or tuple with B entries. Everything else passes through. `seq_len >= S` changes
    nothing.

    Args:
        batch: a mutable mapping of names to tensors (dict, OrderedDict, transformers' BatchEncoding and ModelOutput,
            a TensorDict, ...) or a dataclass. They may lie inside one another: batch["encoder"]["input_ids"] is then
            called "encoder.input_ids" by `keys`, `mask_keys`, `pad_values` and `out`.
        seq_len: tokens in a new row, at least 1.
        mode: "truncate" keeps the first `seq_len` tokens of each row. "reshape" cuts each row into rows of
            `seq_len`, row by row. "flatten" cuts the whole batch, read as one stream, and drops the tail.
        remainder: what "reshape" does with the S % seq_len tokens at the end of a row: "drop" them, "pad" them
            to a full row, or "overlap": the last new row holds the row's last `seq_len` tokens, and labels of
            tokens that stand twice are filled the second time.
        seq_dim: 1 for (batch, sequence, ...), 0 for (sequence, batch, ...). The results for 0 are transposed
            views of (rows, seq_len, ...) storage.
        pad_values: what a padded slot holds, by name; by default −100 for "labels" and names that end in
            "_labels", 0 for all others.
        keep_last_token: under "truncate", a row whose last valid token was cut takes it in its last slot, for
            every tensor. Needs a (B, S) "attention_mask".
        keys: the tensors to resize; everything else passes through. Default: all.
        mask_keys: which (B, S, S) and (B, 1, S, S) tensors are masks over pairs of tokens. Default: names that
            end in "_mask".
        copy: False returns views of the input wherever a view can express the result.
        out: `BatchBuffers`, or contiguous tensors to write to, by name, each of the source's dtype and device and
            large enough; the result is carved from their first elements, so that addresses stay the same.
        return_info: also return a `ResizeInfo`.
        backend: None (best available), "reference", "native" or "triton".

    Returns:
        A batch of the same types, or (batch, ResizeInfo).

    Raises:
        TypeError: `batch` is no mutable mapping and no dataclass, or an argument has the wrong type.
        ValueError: the tensors disagree, or an argument does not fit them; nothing was written.
    """
    check_int("seq_len", seq_len, minimum=1)
    found = leaves(batch)
    recipe = recipe_for(found, Options(mode, remainder, seq_dim, keep_last_token, pad_values, keys, mask_keys, backend))
    if out is not None and not copy:
        raise ValueError("out must be None with copy=False: views are not written anywhere")

    tensors = [found[name] for name in recipe.names]
    mask = None if recipe.mask_name is None else found[recipe.mask_name]
    if recipe.rearranged:
        tensors = [_rows_first(t, kind, seq_dim) for t, kind in zip(tensors, recipe.kinds, strict=True)]
        mask = mask if mask is None or seq_dim == 1 else mask.transpose(0, 1)
    length = recipe.length(seq_len)
    if not copy and _is_a_view(recipe, length):
        results = [_view(t, kind, recipe, length) for t, kind in zip(tensors, recipe.kinds, strict=True)]
        info = _info_alone(recipe, tensors, mask, length) if return_info else []
    else:
        if recipe.needs_gradient is not None and torch.is_grad_enabled():
            validation.check_no_gradient(recipe.needs_gradient, found[recipe.needs_gradient])
        results = _copy(recipe, tensors, mask, length, out, return_info)
        info = results[len(tensors) :]
    new_leaves = dict(zip(recipe.names, results, strict=False))
    if recipe.rearranged:
        for name, kind in zip(recipe.names, recipe.kinds, strict=True):
            new_leaves[name] = _as_given(new_leaves[name], found[name], kind, seq_dim)
    rows = recipe.rows(length)
    for name in recipe.row_lists:
        new_leaves[name] = _repeated(found[name], rows)
    new_batch = replaced(batch, new_leaves, (rows, length) if seq_dim == 1 else (length, rows))
    return (new_batch, ResizeInfo(*info)) if return_info else new_batch


def _copy(
    recipe: Recipe,
    tensors: list[Tensor],
    attention_mask: Tensor | None,
    length: int,
    out: Mapping[str, Tensor] | None,
    return_info: bool,
) -> list[Tensor]:
    """New tensors, or tensors carved from `out`; then the info."""
    if out is None:
        return recipe.run(tensors, attention_mask, length, return_info)
    if not isinstance(out, BatchBuffers):
        outputs = _carve(recipe, tensors, length, out, return_info)
        return recipe.run(tensors, attention_mask, length, return_info, outputs)
    outputs = out.views(recipe, tensors, length, return_info)
    recipe.run(tensors, attention_mask, length, return_info, outputs)
    if out.device.type != recipe.device_type:
        out.keep_while_read(tensors if attention_mask is None else [*tensors, attention_mask])
    return outputs


def _carve(
    recipe: Recipe, tensors: list[Tensor], length: int, out: Mapping[str, Tensor], return_info: bool
) -> list[Tensor]:
    shapes = recipe.shapes(tensors, length, return_info)
    sources = dict(zip(recipe.names, tensors, strict=True))
    carved = {
        name: validation.check_storage(name, out, source, shape, source.device)
        for (name, source), shape in zip(sources.items(), shapes, strict=False)
    }
    validation.check_no_overlap(carved, sources)
    device = next(iter(carved.values())).device
    info = [
        torch.empty(shape, dtype=dtype, device=device)
        for shape, dtype in zip(shapes[len(tensors) :], INFO_DTYPES, strict=False)
    ]
    return [*carved.values(), *info]


def _info_alone(recipe: Recipe, tensors: list[Tensor], attention_mask: Tensor | None, length: int) -> list[Tensor]:
    """For a batch whose tensors are views."""
    if attention_mask is None:
        attention_mask = tensors[0].new_ones(1, 1).expand(recipe.batch_size, recipe.source_length)
    return recipe.run([], attention_mask, length, return_info=True)


def _is_a_view(recipe: Recipe, length: int) -> bool:
    """Whether strides alone can say what the rule says; they cannot fill slots, nor take a token elsewhere."""
    if recipe.rule == "truncate_keep_last":
        return length == recipe.source_length
    return recipe.rule not in ("reshape_pad", "reshape_overlap") or recipe.source_length % length == 0


def _view(tensor: Tensor, kind: int, recipe: Recipe, length: int) -> Tensor:
    """A view of the tensor, but a copy where its strides do not allow one."""
    if recipe.rule.startswith("truncate"):
        for dim in SEQUENCE_DIMS[Kind(kind)]:
            tensor = tensor.narrow(dim, 0, length)
        return tensor
    batch_size, source_length = recipe.batch_size, recipe.source_length
    if kind == Kind.ROW:
        return tensor.repeat_interleave(source_length // length)
    features, rows = tensor.shape[2:], recipe.rows(length)
    if recipe.rule == "flatten":
        stream = tensor.reshape(batch_size * source_length, *features)
        return stream[: rows * length].reshape(rows, length, *features)
    return tensor[:, : source_length // length * length].reshape(rows, length, *features)


def _repeated(entries: list[Any] | tuple[Any, ...], rows: int) -> Any:
    """An entry for each new row."""
    times = rows // max(len(entries), 1)
    return type(entries)(entry for entry in entries for _ in range(times))


def _rows_first(tensor: Tensor, kind: int, seq_dim: int) -> Tensor:
    """As the operator takes it: (B,), (B, S, features...), or (B, S, S) for a mask over pairs of tokens."""
    if kind == Kind.SQUARE:
        return tensor.squeeze(1) if tensor.dim() == 4 else tensor
    return tensor if kind == Kind.ROW or seq_dim == 1 else tensor.transpose(0, 1)


def _as_given(result: Tensor, given: Tensor, kind: int, seq_dim: int) -> Tensor:
    """The reverse of `_rows_first`."""
    if kind == Kind.SQUARE:
        return result.unsqueeze(1) if given.dim() == 4 else result
    return result if kind == Kind.ROW or seq_dim == 1 else result.transpose(0, 1)
