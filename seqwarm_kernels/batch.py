"""What: make this batch that long."""

from __future__ import annotations

import copy as copying
from collections import UserDict
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import check_int
from .ops import backends
from .ops.library import overload
from .ops.resize_batch import validation
from .ops.resize_batch.schema import INFO_DTYPES, SEQUENCE_DIMS, Kind, new_rows, output_shapes
from .ops.resize_batch.validation import Layout


class ResizeInfo(NamedTuple):
    """What a resized batch holds. A token is valid where the attention mask is not 0; all are without a mask."""

    valid_lengths: Tensor  #: (rows,) int32, valid tokens of each new row
    position_ids: Tensor  #: (rows, seq_len) int64, valid tokens before this one in its new row; 0 if not valid
    num_valid_tokens: Tensor  #: () int64, on the batch's device


def resize_batch(
    batch: MutableMapping[str, Any],
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
    each row. Scalars and everything that is no tensor pass through. `seq_len >= S` changes nothing.

    Args:
        batch: a mutable mapping of names to tensors (dict, OrderedDict, transformers' BatchEncoding, ...).
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
        out: contiguous tensors to write to, by name, each of the source's dtype and device and large enough;
            the result is carved from their first elements, so that addresses stay the same.
        return_info: also return a `ResizeInfo`.
        backend: None (best available), "reference", "native" or "triton".

    Returns:
        A mapping of the batch's type, or (mapping, ResizeInfo).

    Raises:
        TypeError: `batch` is no mutable mapping, or an argument has the wrong type.
        ValueError: the tensors disagree, or an argument does not fit them; nothing was written.
    """
    if not isinstance(batch, MutableMapping):
        raise TypeError(f"batch must be a mutable mapping of names to tensors, got {type(batch).__name__}")
    check_int("seq_len", seq_len, minimum=1)
    rule = validation.resizing_rule(mode, remainder, keep_last_token)
    validation.check_names("pad_values", pad_values, batch)
    layout = validation.batch_layout(batch, mode=mode, seq_dim=seq_dim, keys=keys, mask_keys=mask_keys)
    mask = validation.row_mask(batch, layout, seq_dim)
    validation.check_keep_last(rule, mask)
    if out is not None and not copy:
        raise ValueError("out must be None with copy=False: views are not written anywhere")

    tensors = {name: _rows_first(batch[name], kind, seq_dim) for name, kind in layout.kinds.items()}
    cut = _Cut(layout, seq_len, rule, return_info, backend)
    if not copy and cut.is_a_view():
        entries = {name: cut.view(tensor, layout.kinds[name]) for name, tensor in tensors.items()}
        info = cut.info(tensors, mask)
    else:
        entries, info = cut.copy(tensors, mask, pad_values, out)
    new_batch = _with_entries(
        batch,
        {name: _as_given(entries[name], batch[name], kind, seq_dim) for name, kind in layout.kinds.items()},
    )
    return (new_batch, ResizeInfo(*info)) if return_info else new_batch


@dataclass(frozen=True)
class _Cut:
    """One checked call: how tensors with their rows first are cut."""

    layout: Layout
    seq_len: int
    rule: str
    return_info: bool
    backend: str | None

    def copy(
        self,
        tensors: dict[str, Tensor],
        attention_mask: Tensor | None,
        pad_values: Mapping[str, float] | None,
        out: Mapping[str, Tensor] | None,
    ) -> tuple[dict[str, Tensor], list[Tensor]]:
        """New tensors by name, or tensors carved from `out`; and the info."""
        fill_values = []
        for name, tensor in tensors.items():
            validation.check_no_gradient(name, tensor)
            fill_values.append(validation.fill_value(name, self.layout.kinds[name], tensor.dtype, pad_values))
        outputs = None if out is None else self._carve(tensors, out)
        results = self._run(list(tensors.values()), attention_mask, fill_values, outputs)
        return dict(zip(tensors, results, strict=False)), results[len(tensors) :]

    def info(self, tensors: dict[str, Tensor], attention_mask: Tensor | None) -> list[Tensor]:
        """The info alone, for a batch whose tensors are views."""
        if not self.return_info:
            return []
        if attention_mask is None:
            some_tensor = next(iter(tensors.values()))
            attention_mask = some_tensor.new_ones(1, 1).expand(self.layout.batch_size, self.layout.source_length)
        return self._run([], attention_mask, [], None)

    def _run(
        self,
        inputs: list[Tensor],
        attention_mask: Tensor | None,
        fill_values: list[float],
        outputs: list[Tensor] | None,
    ) -> list[Tensor]:
        kinds = [int(kind) for kind in self.layout.kinds.values()][: len(inputs)]
        sizes = (self.layout.batch_size, self.layout.source_length, self.seq_len)
        arguments = (inputs, attention_mask, *sizes, self.rule, kinds, fill_values, self.return_info)
        name = "resize_batch" if outputs is None else "resize_batch_out"
        device = (inputs[0] if attention_mask is None else attention_mask).device
        operator = overload(name, backends.choose(name, device.type, self.backend))
        if outputs is None:
            return operator(*arguments)
        operator(*arguments, outputs)
        return outputs

    def _carve(self, tensors: dict[str, Tensor], out: Mapping[str, Tensor]) -> list[Tensor]:
        kinds = [self.layout.kinds[name] for name in tensors]
        length = min(self.seq_len, self.layout.source_length)
        rows = new_rows(self.layout.batch_size, self.layout.source_length, length, self.rule)
        shapes = output_shapes(list(tensors.values()), kinds, rows, length, self.return_info)
        carved = {
            name: validation.check_storage(name, out, tensors[name], shape)
            for name, shape in zip(tensors, shapes, strict=False)
        }
        validation.check_no_overlap(carved, tensors)
        device = next(iter(tensors.values())).device
        info = [
            torch.empty(shape, dtype=dtype, device=device)
            for shape, dtype in zip(shapes[len(tensors) :], INFO_DTYPES, strict=False)
        ]
        return [*carved.values(), *info]

    def is_a_view(self) -> bool:
        """Whether strides alone can say what the rule says; they cannot fill slots, nor take a token elsewhere."""
        whole_rows = self.seq_len >= self.layout.source_length or self.layout.source_length % self.seq_len == 0
        return self.rule in ("truncate", "flatten", "reshape_drop") or (self.rule.startswith("reshape") and whole_rows)

    def view(self, tensor: Tensor, kind: Kind) -> Tensor:
        """A view of the tensor, but a copy where its strides do not allow one."""
        length = min(self.seq_len, self.layout.source_length)
        batch_size, chunks = self.layout.batch_size, self.layout.source_length // length
        if self.rule == "truncate":
            for dim in SEQUENCE_DIMS[kind]:
                tensor = tensor.narrow(dim, 0, length)
            return tensor
        if kind == Kind.ROW:
            return tensor.repeat_interleave(chunks)
        features = tensor.shape[2:]
        if self.rule == "flatten":
            rows = new_rows(batch_size, self.layout.source_length, length, self.rule)
            stream = tensor.reshape(batch_size * self.layout.source_length, *features)
            return stream[: rows * length].reshape(rows, length, *features)
        return tensor[:, : chunks * length].reshape(batch_size * chunks, length, *features)


def _rows_first(tensor: Tensor, kind: Kind, seq_dim: int) -> Tensor:
    """As the operator takes it: (B,), (B, S, features...), or (B, S, S) for a mask over pairs of tokens."""
    if kind == Kind.SQUARE:
        return tensor.squeeze(1) if tensor.dim() == 4 else tensor
    return tensor if kind == Kind.ROW or seq_dim == 1 else tensor.transpose(0, 1)


def _as_given(result: Tensor, given: Tensor, kind: Kind, seq_dim: int) -> Tensor:
    """The reverse of `_rows_first`."""
    if kind == Kind.SQUARE:
        return result.unsqueeze(1) if given.dim() == 4 else result
    return result if kind == Kind.ROW or seq_dim == 1 else result.transpose(0, 1)


def _with_entries(batch: MutableMapping[str, Any], entries: dict[str, Tensor]) -> MutableMapping[str, Any]:
    """A mapping of the batch's type with these entries replaced."""
    if type(batch) is dict:  # torch.compile traces this, but not copy.copy
        return {**batch, **entries}
    if isinstance(batch, (dict, UserDict)):  # their copies keep attributes and share no storage
        new_batch = copying.copy(batch)
        new_batch.update(entries)
        return new_batch
    return type(batch)({**batch, **entries})  # type: ignore[call-arg]
