"""A call of `resize_batch` after its checks. The checks run once for all batches of the same shapes and options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.resize_batch.schema import INFO_DTYPES, LACKING, SEQUENCE_DIMS, Kind, new_rows, output_shapes
from ..utils.checks import check_no_tangent
from .buffers import BatchBuffers
from .entry_names import warn_of_counts
from .layout import batch_layout, check_no_gradient, fill_value
from .masks import (
    check_keep_last,
    check_masks_begin_together,
    check_no_row_begins_masked,
    check_not_additive,
    mask_names,
    row_mask_name,
    warn_of_unread_masks,
)
from .options import check_name_arguments, check_names, is_list, resizing_rule
from .packing import check_mask_values
from .storage import check_no_overlap, check_storage

#: From a batch and a length to the new batch, or None where the call has to take the longer way.
DirectCall = Callable[[dict[str, Tensor], int], dict[str, Tensor] | None]


class Options(NamedTuple):
    """The plain arguments of `resize_batch` that the checks depend on."""

    mode: str
    remainder: str
    seq_dim: int
    keep_last_token: bool
    backend: str | None


@dataclass(frozen=True, eq=False)
class CheckedCall:
    """Which tensors are resized, and how. Made by `cached_call`, valid for every length."""

    rule: str
    batch_size: int
    source_length: int
    seq_dim: int
    names: tuple[str, ...]  #: names of the tensors that are resized
    kinds: list[int]  #: a `Kind` for each tensor; plain numbers cost the operator less
    fill_values: list[float]  #: for each tensor, the value of a slot without a token
    mask_name: str | None
    masks_of_one_cut: list[str]  #: masks that must begin with a valid token, because all tensors are cut at one place
    real_masks: list[str]  #: masks of floating point
    row_lists: list[str]  #: names of lists and tuples with one entry for each row
    rearranged: bool  #: whether the operator takes a tensor in another shape than the batch holds it
    needs_gradient: str | None  #: name of a tensor that requires a gradient
    backend: str | None
    dtype: torch.dtype | None  #: a dtype that not every backend supports
    device_type: str

    def run(
        self, entries: Mapping[str, Any], seq_len: int, copy: bool, out: Mapping[str, Tensor] | None, return_info: bool
    ) -> tuple[dict[str, Any], tuple[int, int], list[Tensor]]:
        """Resize the entries of a batch.

        Returns:
            The new entries by name, the first two sizes of the new tensors, and the fields of `ResizeInfo`: an empty
            list without `return_info`.
        """
        length = min(seq_len, self.source_length)
        for name in self.real_masks:
            check_not_additive(name, entries[name])
        if self.masks_of_one_cut and length < self.source_length:
            masks = {name: self._rows_first(entries[name]) for name in self.masks_of_one_cut}
            check_masks_begin_together(masks)
        rows = new_rows(self.batch_size, self.source_length, length, self.rule)
        tensors = [entries[name] for name in self.names]
        mask = None if self.mask_name is None else entries[self.mask_name]
        if self.rearranged:
            tensors = [self._operator_shape(tensor, kind) for tensor, kind in zip(tensors, self.kinds, strict=True)]
            mask = mask if mask is None else self._rows_first(mask)

        if not copy and self._views_suffice(length):
            if mask is not None and self.rule == "truncate_valid" and length < self.source_length:
                check_no_row_begins_masked(self.mask_name, mask)
            results = [self._view(tensor, kind, rows, length) for tensor, kind in zip(tensors, self.kinds, strict=True)]
            info = self._info(tensors[0], mask, length) if return_info else []
        else:
            if self.needs_gradient is not None and torch.is_grad_enabled():
                check_no_gradient(self.needs_gradient, entries[self.needs_gradient])
            for name in self.names:
                check_no_tangent(f"batch[{name!r}]", entries[name])
            results = self._copy(entries, tensors, mask, rows, length, out, return_info)
            info = results[len(tensors) :]

        new_entries = dict(zip(self.names, results, strict=False))
        if self.rearranged:
            for name, kind in zip(self.names, self.kinds, strict=True):
                new_entries[name] = self._batch_shape(new_entries[name], kind, entries[name].dim())
        for name in self.row_lists:
            new_entries[name] = repeated(entries[name], rows // max(self.batch_size, 1))
        return new_entries, (rows, length) if self.seq_dim == 1 else (length, rows), info

    def direct(self, copy: bool) -> DirectCall | None:
        """The call in C++ for batches that have a kind (`call_kind`), or None where C++ does not serve."""
        serves = self.rule in ("truncate", "truncate_valid")
        if copy:
            serves = backends.choose("resize_batch", self.device_type, self.backend, self.dtype) == "native"
        if not serves or self.rearranged or self.masks_of_one_cut or self.real_masks or backends.extension is None:
            return None
        sizes = (self.batch_size, self.source_length)
        call: DirectCall = backends.extension.resize_call(
            self.rule, *sizes, self.names, self.kinds, self.fill_values, self.mask_name, copy
        )
        return call

    def _copy(
        self,
        entries: Mapping[str, Any],
        tensors: list[Tensor],
        mask: Tensor | None,
        rows: int,
        length: int,
        out: Mapping[str, Tensor] | None,
        return_info: bool,
    ) -> list[Tensor]:
        """The resized tensors, then those of the info: new tensors, or views of `out`."""
        sizes = (self.batch_size, self.source_length, length)
        arguments = (tensors, mask, *sizes, self.rule, self.kinds, self.fill_values, return_info)
        if out is None:
            return self._operator("resize_batch", self.device_type)(*arguments)

        shapes = functools.partial(output_shapes, tensors, self.kinds, rows, length, return_info)
        if isinstance(out, BatchBuffers):
            outputs = out.views((self, length, return_info), self.names, tensors, shapes)
        else:
            outputs = self._views_of_out(out, entries, tensors, shapes())
        device_type = outputs[0].device.type
        self._operator("resize_batch_out", device_type)(*arguments, outputs)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(outputs)  # autograd then notices that a saved tensor was overwritten
        if device_type != self.device_type and isinstance(out, BatchBuffers):  # the batch is in pinned memory
            out.keep_while_read(tensors if mask is None else [*tensors, mask])
        return outputs

    def _operator(self, name: str, device_type: str) -> torch._ops.OpOverload:
        return overload(name, backends.choose(name, device_type, self.backend, self.dtype))

    def _views_of_out(
        self,
        out: Mapping[str, Tensor],
        entries: Mapping[str, Any],
        tensors: list[Tensor],
        shapes: list[tuple[int, ...]],
    ) -> list[Tensor]:
        """The first elements of each tensor of `out` in the shape of the result, then new tensors for the info."""
        sources = dict(zip(self.names, tensors, strict=True))
        views = {
            name: check_storage(name, out, source, shape, source.device)
            for (name, source), shape in zip(sources.items(), shapes, strict=False)
        }
        check_no_overlap(views, entries)
        info = [
            torch.empty(shape, dtype=dtype, device=tensors[0].device)
            for shape, dtype in zip(shapes[len(tensors) :], INFO_DTYPES, strict=False)
        ]
        return [*views.values(), *info]

    def _info(self, tensor: Tensor, mask: Tensor | None, length: int) -> list[Tensor]:
        """The info alone, for results that are views."""
        if mask is None:
            mask = tensor.new_ones(1, 1).expand(self.batch_size, self.source_length)
        sizes = (self.batch_size, self.source_length, length)
        return self._operator("resize_batch", self.device_type)([], mask, *sizes, self.rule, [], [], True)

    def _views_suffice(self, length: int) -> bool:
        """Whether strides can express the rule: a view cannot fill a slot or move a token."""
        if self.rule == "truncate_keep_last":
            return length == self.source_length
        return self.rule not in ("reshape_pad", "reshape_overlap") or self.source_length % length == 0

    def _view(self, tensor: Tensor, kind: int, rows: int, length: int) -> Tensor:
        """A view of the tensor, or a copy where its strides do not allow a view."""
        if self.rule.startswith("truncate"):
            for dim in SEQUENCE_DIMS[Kind(kind)]:
                tensor = tensor.narrow(dim, 0, length)
            return tensor
        rows_of_each, features = self.source_length // length, tensor.shape[2:]
        if kind == Kind.ROW:
            return tensor.repeat_interleave(rows_of_each)
        if self.rule == "flatten":
            stream = tensor.reshape(self.batch_size * self.source_length, *features)
            return stream[: rows * length].reshape(rows, length, *features)
        return tensor[:, : rows_of_each * length].reshape(rows, length, *features)

    def _rows_first(self, mask: Tensor) -> Tensor:
        return mask if self.seq_dim == 1 else mask.transpose(0, 1)

    def _operator_shape(self, tensor: Tensor, kind: int) -> Tensor:
        """The tensor as the operator takes it: (B,), (B, S, features...), or (B, S, S) for a mask over token pairs."""
        if kind == Kind.SQUARE:
            return tensor.squeeze(1) if tensor.dim() == 4 else tensor
        return tensor if kind == Kind.ROW or self.seq_dim == 1 else tensor.transpose(0, 1)

    def _batch_shape(self, result: Tensor, kind: int, source_dim: int) -> Tensor:
        """Reverse of `_operator_shape`, for a source of `source_dim` dimensions."""
        if kind == Kind.SQUARE:
            return result.unsqueeze(1) if source_dim == 4 else result
        return result if kind == Kind.ROW or self.seq_dim == 1 else result.transpose(0, 1)


def repeated(entries: list[Any] | tuple[Any, ...], times: int) -> Any:
    return type(entries)(entry for entry in entries for _ in range(times))


#: Checked calls by the signature of their batch and options. A training run has one or two.
_calls: dict[Any, CheckedCall] = {}
_MAX_CALLS = 256


def cached_call(
    entries: Mapping[str, Any],
    options: Options,
    pad_values: Mapping[str, float] | None,
    keys: Collection[str] | None,
    mask_keys: Collection[str] | None,
) -> CheckedCall:
    """The checked call for a batch with these entries.

    Raises:
        TypeError: The batch or an argument has the wrong type.
        ValueError: The tensors disagree, or an argument does not fit them.
    """
    arguments = (entries, options, pad_values, keys, mask_keys)
    if torch.compiler.is_compiling():  # traced once, and shapes may be symbols
        return check_call(*arguments)
    try:
        signatures = tuple([_signature(name, entry) for name, entry in entries.items()])
        key = signatures, options, _hashable(pad_values, keys, mask_keys)
        call = _calls.get(key)
    except (TypeError, RuntimeError):  # a name or an option is not hashable, sizes are symbols, a tensor has no shape
        return check_call(*arguments)
    if call is None:
        call = check_call(*arguments)
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


def _signature(name: str, entry: object) -> tuple[object, ...]:
    """Everything about an entry that the checks read."""
    if isinstance(entry, Tensor):
        return name, entry.shape, entry.dtype, entry.device, entry.requires_grad, entry.layout
    if is_list(entry):
        return name, len(entry)  # type: ignore[arg-type]
    return name, getattr(entry, "shape", None)  # of an array


def _hashable(
    pad_values: Mapping[str, float] | None, keys: Collection[str] | None, mask_keys: Collection[str] | None
) -> tuple[object, ...] | None:
    if pad_values is None and keys is None and mask_keys is None:
        return None
    check_name_arguments(pad_values, keys, mask_keys)  # before an iterator is used up
    # the text of a value distinguishes 0.0 from -0.0
    values = None if pad_values is None else tuple([(name, repr(value)) for name, value in pad_values.items()])
    return values, *[None if names is None else tuple(names) for names in (keys, mask_keys)]


def check_call(
    entries: Mapping[str, Any],
    options: Options,
    pad_values: Mapping[str, float] | None,
    keys: Collection[str] | None,
    mask_keys: Collection[str] | None,
    *,
    dtensors: bool = False,
) -> CheckedCall:
    """The checked call for a batch with these entries, not remembered. `dtensors`: whether tensors may be DTensors."""
    rule = resizing_rule(options.mode, options.remainder, options.keep_last_token)
    backends.check_backend(options.backend)  # views use none
    check_name_arguments(pad_values, keys, mask_keys)
    check_names("pad_values", pad_values, entries)
    layout = batch_layout(
        entries, mode=options.mode, seq_dim=options.seq_dim, keys=keys, mask_keys=mask_keys, dtensors=dtensors
    )
    check_mask_values(entries)
    mask_name = row_mask_name(entries, layout, options.seq_dim)
    check_keep_last(rule, mask_name)
    masks = mask_names(entries, layout, options.seq_dim)
    if rule == "truncate" and mask_name in masks:
        rule = "truncate_valid"
    if rule == "truncate" and not masks and not torch.compiler.is_compiling():
        warn_of_unread_masks(entries, layout.source_length)
    if not torch.compiler.is_compiling():
        warn_of_counts(name for name, kind in layout.kinds.items() if kind == Kind.ROW)
    tensors = {name: entries[name] for name in layout.kinds}
    moves_all = masks in ([], [mask_name])  # the one mask of the batch
    kinds = [int(kind) for kind in layout.kinds.values()]
    fills_labels = rule in ("reshape_pad", "reshape_overlap")
    return CheckedCall(
        rule=rule,
        batch_size=layout.batch_size,
        source_length=layout.source_length,
        seq_dim=options.seq_dim,
        names=tuple(layout.kinds),
        kinds=kinds,
        fill_values=[
            fill_value(name, kind, tensors[name].dtype, pad_values, fills_labels) for name, kind in layout.kinds.items()
        ],
        mask_name=mask_name,
        masks_of_one_cut=[] if moves_all or not rule.startswith("truncate") else masks,
        real_masks=[name for name in masks if entries[name].is_floating_point()],
        row_lists=layout.row_lists,
        rearranged=options.seq_dim != 1 or Kind.SQUARE in kinds,
        needs_gradient=next((name for name, tensor in tensors.items() if tensor.requires_grad), None),
        backend=options.backend,
        dtype=rare_dtype([tensor.dtype for tensor in tensors.values()], LACKING),
        device_type=next(iter(tensors.values())).device.type,
    )


def rare_dtype(dtypes: list[torch.dtype], lacking: Mapping[str, tuple[torch.dtype, ...]]) -> torch.dtype | None:
    """The first dtype that a backend lacks."""
    lacked = {dtype for of_backend in lacking.values() for dtype in of_backend}
    return next((dtype for dtype in dtypes if dtype in lacked), None)
