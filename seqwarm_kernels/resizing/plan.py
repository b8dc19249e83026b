"""How the batches of one signature are resized: made once from names, shapes and options, then run for every batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import backends
from ..ops.library import overload
from ..ops.resize_batch.schema import LACKING, Kind, new_rows, output_shapes
from ..utils.checks import check_no_tangent
from .buffers import BatchBuffers, outputs_in
from .entry_names import own_name
from .layout import Axes, Layout, batch_layout
from .masks import check_first_tokens, check_mask, mask_names, row_mask_name
from .options import Options, fill_value


@dataclass(eq=False)
class Plan:
    """Which tensors are resized, and how. Valid for every length."""

    rule: str
    layout: Layout
    options: Options
    names: list[str]  #: tensors that the operator takes
    kinds: list[int]  #: of `names`; plain numbers cost the operator less than a `Kind`
    fill_values: list[float]  #: of `names`: the value of a slot without a token
    moved: dict[str, tuple[Any, ...]]  #: dimensions of rows and tokens, where the operator takes them in another order
    cut_alike: list[str]  #: tensors that rows share, whose first tokens are kept
    mask: str | None  #: the attention mask of the rows
    even_masks: list[str]  #: masks of rows that must begin with a token, since all are cut at one place
    real_masks: list[str]  #: masks of floating point
    rare_dtype: torch.dtype | None  #: a dtype that not every backend supports
    device: torch.device
    #: Chosen by the first copy, not by each, which takes 2 of 20 µs. Not chosen for `out`, on any device.
    operator: torch._ops.OpOverload | None = None

    def run(
        self, entries: Mapping[str, Any], seq_len: int, copy: bool, out: Mapping[str, Tensor] | None, return_info: bool
    ) -> tuple[dict[str, Any], list[Any]]:
        """The new entries by name, and the fields of `ResizeInfo`: an empty list without `return_info`."""
        length = min(seq_len, self.layout.source_length)
        as_views = not copy and self._can_be_views(length)
        self._check_masks(entries, length, as_views)
        if as_views:
            resized, info = self._views(entries, length, return_info)
        else:
            resized, info = self._copies(entries, length, return_info, out)
        if self.layout.row_lists:
            times = self._new_rows(length) // max(self.layout.batch_size, 1)
            for name in self.layout.row_lists:
                resized[name] = type(entries[name])(value for value in entries[name] for _ in range(times))
        return resized, info

    def _check_masks(self, entries: Mapping[str, Any], length: int, as_views: bool) -> None:
        for name in self.real_masks:
            check_mask(name, entries[name])
        rules = {
            name: f"batch[{name!r}] must begin with a valid token in each row, since tensors are cut at one place"
            for name in self.even_masks
        }
        if as_views and self.rule == "truncate_valid" and not rules:
            rules = {str(self.mask): f"copy must be True where rows of batch[{self.mask!r}] begin with padding"}
        if rules and length < self.layout.source_length:  # a comparison would compile each length anew
            for name, rule in rules.items():
                check_first_tokens(self._rows_first(entries[name]), rule)

    # ---- views

    def _can_be_views(self, length: int) -> bool:
        """Whether strides can express the rule: a view cannot fill a slot or move a token."""
        if self.rule == "truncate_keep_last":
            return length == self.layout.source_length
        return self.rule not in ("reshape_pad", "reshape_overlap") or self.layout.source_length % length == 0

    def _views(self, entries: Mapping[str, Any], length: int, return_info: bool) -> tuple[dict[str, Any], list[Tensor]]:
        """Views of the entries, or copies where strides do not allow a view."""
        info = []
        if return_info:
            operator, mask = self._operator("resize_batch", self.device), self._mask(entries, needed=True)
            info = operator([], mask, *self._sizes(length), self.rule, [], [], True)
        if self.rule.startswith("truncate"):
            return {name: _first_tokens(entries[name], axes, length) for name, axes in self.layout.axes.items()}, info
        inputs = zip(self._inputs(entries), self.kinds, strict=True)
        return self._outputs([self._reshaped_view(tensor, kind, length) for tensor, kind in inputs]), info

    def _reshaped_view(self, tensor: Tensor, kind: int, length: int) -> Tensor:
        if kind == Kind.ROW:
            return tensor.repeat_interleave(self.layout.source_length // length)
        if self.rule == "flatten":
            tensor = tensor.flatten(0, 1)[None]
        kept = tensor.shape[1] // length * length
        return tensor[:, :kept].reshape(self._new_rows(length), length, *tensor.shape[2:])

    # ---- copies

    def _copies(
        self, entries: Mapping[str, Any], length: int, return_info: bool, out: Mapping[str, Tensor] | None
    ) -> tuple[dict[str, Any], list[Tensor]]:
        """New tensors, or views of `out`, with the results."""
        inputs = self._inputs(entries)
        for name, tensor in zip(self.names, inputs, strict=True):  # the operator carries no gradient and no tangent
            if tensor.requires_grad and torch.is_grad_enabled():
                raise ValueError(f"batch[{name!r}] requires a gradient, which a copy does not carry")
            if tensor.is_floating_point():
                check_no_tangent(f"batch[{name!r}]", tensor)
        mask, sizes = self._mask(entries, needed=not inputs), self._sizes(length)
        arguments = inputs, mask, *sizes, self.rule, self.kinds, self.fill_values, return_info
        if out is None:
            self.operator = self.operator or self._operator("resize_batch", self.device)
            results = self.operator(*arguments)
        else:
            results = self._written(entries, arguments, length, out)
        resized = self._outputs(results)
        for name in self.cut_alike:
            cut = _first_tokens(entries[name], self.layout.axes[name], length)
            resized[name] = cut.clone(memory_format=torch.contiguous_format)
        return resized, results[len(self.names) :]

    def _written(
        self, entries: Mapping[str, Any], arguments: tuple[Any, ...], length: int, out: Mapping[str, Tensor]
    ) -> list[Tensor]:
        """The results of the operator in the memory of `out`."""
        if self.cut_alike:
            raise ValueError(f"out must be None with {self.cut_alike[0]!r}, which rows share")
        inputs, mask, *_, return_info = arguments
        shapes = output_shapes(inputs, self.kinds, self._new_rows(length), length, return_info)
        outputs = outputs_in(out, dict(zip(self.names, inputs, strict=True)), shapes, entries)
        device = outputs[0].device
        self._operator("resize_batch_out", device)(*arguments, outputs)
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(outputs)  # autograd then notices that a saved tensor was overwritten
        if device.type != self.device.type and isinstance(out, BatchBuffers):  # the batch is in pinned memory
            out.keep_while_read(inputs if mask is None else [*inputs, mask])
        return outputs

    # ---- what the operator takes and returns

    def _operator(self, name: str, device: torch.device) -> torch._ops.OpOverload:
        return overload(name, backends.choose(name, device.type, self.options.backend, self.rare_dtype))

    def _sizes(self, length: int) -> tuple[int, int, int]:
        return self.layout.batch_size, self.layout.source_length, length

    def _new_rows(self, length: int) -> int:
        return new_rows(*self._sizes(length), self.rule)

    def _mask(self, entries: Mapping[str, Any], needed: bool) -> Tensor | None:
        if self.mask is not None:
            return self._rows_first(entries[self.mask])
        if not needed:
            return None
        return torch.ones(1, 1, device=self.device).expand(self.layout.batch_size, self.layout.source_length)

    def _rows_first(self, mask: Tensor) -> Tensor:
        return mask if self.options.seq_dim == 1 else mask.transpose(0, 1)

    def _inputs(self, entries: Mapping[str, Any]) -> list[Tensor]:
        """Tensors as the operator takes them: (B,), (B, S, features...), or (B, S, S) for a mask over token pairs."""
        tensors = [entries[name] for name in self.names]
        for name, dims in self.moved.items():
            index = self.names.index(name)
            moved = tensors[index].movedim(dims, tuple(range(len(dims))))
            tensors[index] = moved.squeeze(3) if len(dims) == 3 else moved
        return tensors

    def _outputs(self, results: list[Tensor]) -> dict[str, Any]:
        """Reverse of `_inputs`."""
        resized = dict(zip(self.names, results, strict=False))
        for name, dims in self.moved.items():
            result = resized[name].unsqueeze(3) if len(dims) == 3 else resized[name]
            resized[name] = result.movedim(tuple(range(len(dims))), dims)
        return resized


def _first_tokens(tensor: Tensor, axes: Axes, length: int) -> Tensor:
    for dim in axes.tokens:
        tensor = tensor.narrow(dim, 0, length)
    return tensor


#: Plans by the signature of their batch and options. A training run has one or two.
_plans: dict[Any, Plan] = {}
_MAX_PLANS = 256  # where the length of batches changes, old plans are dropped


def plan_for(entries: Mapping[str, Any], options: Options, pad_values: Mapping[str, float] | None) -> Plan:
    """The plan for a batch with these entries, made for the first batch of its signature."""
    if torch.compiler.is_compiling():  # traced once, and shapes may be symbols
        return make_plan(entries, options, pad_values)
    try:
        # the text of a value distinguishes 0.0 from -0.0
        values = None if pad_values is None else tuple([(name, repr(value)) for name, value in pad_values.items()])
        key = options, values, tuple([_signature(name, entry) for name, entry in entries.items()])
        plan = _plans.get(key)
    except (TypeError, RuntimeError):  # an option cannot be hashed, sizes are symbols, or a tensor is nested
        return make_plan(entries, options, pad_values)
    if plan is None:
        plan = make_plan(entries, options, pad_values)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        _plans[key] = plan
    return plan


def _signature(name: str, entry: Any) -> tuple[object, ...]:
    """Everything about an entry that a plan depends on."""
    if isinstance(entry, Tensor):
        return name, type(entry), entry.shape, entry.dtype, entry.device, entry.layout
    return name, len(entry) if type(entry) in (list, tuple) else getattr(entry, "shape", None)  # of an array


def make_plan(entries: Mapping[str, Any], options: Options, pad_values: Mapping[str, float] | None) -> Plan:
    """The plan for a batch with these entries. Reads attention masks of integers in host memory."""
    rule, layout = options.rule(), batch_layout(entries, options)
    for name, entry in entries.items():
        is_mask = own_name(name).endswith("attention_mask") and type(entry) is Tensor
        if is_mask and entry.is_cpu and not entry.is_floating_point():
            check_mask(name, entry)
    mask, masks = row_mask_name(entries, layout, options.seq_dim), mask_names(entries, layout, options.seq_dim)
    cut_alike = [name for name, axes in layout.axes.items() if axes.rows is None]
    if rule == "truncate_keep_last" and (mask is None or cut_alike):
        raise ValueError("keep_last_token needs an 'attention_mask' (batch, sequence), and no tensor that rows share")
    if rule == "truncate" and mask in masks:
        rule = "truncate_valid"  # a row that begins with padding is cut from its first valid token on
    is_even = masks not in ([], [mask]) or bool(masks and cut_alike)
    tensors = {name: entries[name] for name in layout.axes}
    lacked = {dtype for dtypes in LACKING.values() for dtype in dtypes}
    inputs = {name: axes for name, axes in layout.axes.items() if axes.rows is not None}
    dims_of = {name: (axes.rows, *axes.tokens) for name, axes in inputs.items()}
    fills_labels = rule in ("reshape_pad", "reshape_overlap")
    return Plan(
        rule=rule,
        layout=layout,
        options=options,
        names=list(inputs),
        kinds=[int(axes.kind) for axes in inputs.values()],
        fill_values=[
            fill_value(name, tensors[name].dtype, pad_values, fills_labels and axes.kind == Kind.LABEL)
            for name, axes in inputs.items()
        ],
        moved={name: dims for name, dims in dims_of.items() if dims != tuple(range(len(dims)))},
        cut_alike=cut_alike,
        mask=mask,
        even_masks=masks if is_even and rule.startswith("truncate") else [],
        real_masks=[name for name in masks if entries[name].is_floating_point()],
        rare_dtype=next((tensor.dtype for tensor in tensors.values() if tensor.dtype in lacked), None),
        device=next(iter(tensors.values())).device,
    )
