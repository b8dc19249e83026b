"""Host side of the Triton kernel: from the operator's arguments to one launch.

A kernel is compiled for each set of dtypes and strides of the source, for each rule and fill values, and for the number
of items that a 16-byte access may hold, which depends on the lengths. Lengths and numbers of rows themselves never
cause another compilation. Tensors that are copied alike share code, so hundreds of them compile in seconds.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ..library import LIBRARY
from ..triton_launch import DISPATCH_KEY, on
from .schema import SKIPPING, Kind, allocate, new_rows
from .triton_kernel import TICKET, Entry, Info, ResizePlan, resize_kernel

GROUPS = 1024  # groups of at most 16 bytes in a program: eight loads in flight for each of its 128 threads
ROWS, COLUMNS = 8, 128  # tile of the info in a program
_WIDEST = 16  # bytes
_LONGEST_LINE = 2**30  # 32-bit indices hold a line and a tile, or two lines
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tiles(count: int, size: int) -> int:
    """The number of tiles that hold `count`, 2 µs sooner than by triton.cdiv."""
    return -(-count // size)


def make_plan(new_rows: int, batch_size: int, source_length: int, new_length: int, rule: str) -> ResizePlan:
    line = source_length if rule == "flatten" else new_rows // batch_size * new_length
    moved_by = line - source_length if rule == "reshape_overlap" else 0
    return ResizePlan(new_rows * new_length, line, source_length, new_length, line - new_length, moved_by)


def make_entry(source: Tensor, out: Tensor, kind: int) -> Entry:
    if source.dtype == torch.complex64:  # Triton has no complex dtypes
        source, out = source.view(torch.int64), out.view(torch.int64)
    row_stride, *inner = source.stride()
    if kind == Kind.ROW:
        return Entry(source, out, row_stride, 0, 1, 1)
    if kind == Kind.SQUARE:
        return Entry(source, out, row_stride, inner[0], inner[1], out.shape[2])
    features = [(size, stride) for size, stride in zip(source.shape[2:], inner[1:], strict=True) if size != 1]
    units = unit_stride = 1
    for size, stride in reversed(features):
        if units == 1:
            unit_stride = stride
        elif stride != units * unit_stride:  # the features do not share one stride
            if source.device != out.device:
                raise ValueError(f"features of a tensor in pinned memory must be contiguous, got {source.stride()}")
            return make_entry(source.contiguous(), out, kind)
        units *= size
    return Entry(source, out, row_stride, inner[0], unit_stride, units)


def group_width(entry: Entry, plan: ResizePlan, kind: int, within_tokens: bool) -> int:
    """Number of items that are adjacent and aligned in both source and output, at every access of the kernel.

    Args:
        within_tokens: The tokens of a new row may come from any positions, so a group must not span two.
    """
    if kind == Kind.ROW or (within_tokens and kind == Kind.SQUARE):
        return 1
    limits = _WIDEST // entry.source.element_size() | entry.row_stride
    if (entry.units == 1 or entry.unit_stride == 1) and entry.position_stride == entry.units and not within_tokens:
        limits |= entry.units * plan.new_length | entry.units * plan.source_length
    elif entry.unit_stride == 1:
        limits |= entry.units | entry.position_stride
    else:
        return 1
    return limits & -limits


@functools.lru_cache(maxsize=256)
def fill_bits(value: float, text: str, dtype: torch.dtype) -> int:
    """The bits of `value` in `dtype`, as an integer. `text` distinguishes 0.0 from -0.0 in the cache."""
    item = torch.tensor(value, dtype=dtype, device="cpu")
    return int(item.view(_INTEGERS[item.element_size()]).item())


def make_layout(
    entry: Entry, plan: ResizePlan, kind: int, rule: str, fill_value: float, dtype: torch.dtype
) -> tuple[int, int, int, int, int]:
    """Kind, bytes of an item, items of a group, bits of the fill value, items of a group within a token."""
    may_fill = kind != Kind.ROW if rule == "reshape_pad" else kind == Kind.LABEL and rule == "reshape_overlap"
    bits = fill_bits(fill_value, str(fill_value), dtype) if may_fill else 0
    widths = [group_width(entry, plan, kind, within_tokens) for within_tokens in (False, True)]
    return int(kind), entry.source.element_size(), widths[rule == "truncate_keep_last"], bits, widths[True]


def bundle(entries: list[Any], layouts: list[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The entries that are copied alike, as one entry with tuples of tensors each, and their layouts.

    They have one layout and equal strides. A tensor that is not aligned is with others like it, since the compiler
    knows only what holds for all.
    """
    alike: dict[Any, list[Any]] = {}
    for entry, layout in zip(entries, layouts, strict=True):
        source, out, *sizes = entry
        aligned = [tensor.data_ptr() % _WIDEST == 0 for tensor in (source, out)]
        alike.setdefault((layout, *sizes, *aligned), []).append(entry)
    bundles = [
        same[0]._replace(source=tuple(entry.source for entry in same), out=tuple(entry.out for entry in same))
        for same in alike.values()
    ]
    return tuple(bundles), tuple(layout for layout, *_ in alike)


@functools.cache
def _running_total_of(device: torch.device, stream: int) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def running_total(device: torch.device) -> Tensor:
    """A zero that the kernel resets at its end. The launches of a stream share it, since they do not overlap."""
    if device.type == "cpu":
        return _running_total_of(device, 0)
    if torch.cuda.is_current_stream_capturing():  # a graph may be replayed on any stream
        return torch.zeros((), dtype=torch.int64, device=device)
    return _running_total_of(device, torch.cuda.current_stream(device).cuda_stream)


def resize_batch_out(
    inputs: list[Tensor],
    attention_mask: Tensor | None,
    batch_size: int,
    source_length: int,
    new_length: int,
    rule: str,
    kinds: list[int],
    fill_values: list[float],
    return_info: bool,
    outputs: list[Tensor],
) -> None:
    new_length = min(new_length, source_length)
    rows = new_rows(batch_size, source_length, new_length, rule)
    if rows == 0 or not outputs:
        if return_info:
            outputs[-1].zero_()
        return
    plan = make_plan(rows, batch_size, source_length, new_length, rule)
    entries, layouts = [], []
    for source, out, kind, fill_value in zip(inputs, outputs, kinds, fill_values, strict=False):
        if out.numel() == 0:
            continue
        entry = make_entry(source, out, kind)
        if entry.units * plan.line > _LONGEST_LINE:
            raise ValueError(f"backend='triton' takes rows of at most {_LONGEST_LINE} items, got {tuple(source.shape)}")
        layouts.append(make_layout(entry, plan, kind, rule, fill_value, source.dtype))
        entries.append(entry)
    if return_info and plan.tokens >= TICKET.value:
        raise ValueError(f"backend='triton' counts fewer than {TICKET.value} tokens, got {plan.tokens}")
    device = outputs[0].device
    with on(device):
        info = Info(outputs[-3], outputs[-2], outputs[-1], running_total(device)) if return_info else None
        _launch(entries, layouts, info, attention_mask, rows, plan, rule)


def _launch(
    entries: list[Entry],
    layouts: list[tuple[int, int, int, int, int]],
    info: Info | None,
    attention_mask: Tensor | None,
    rows: int,
    plan: ResizePlan,
    rule: str,
) -> None:
    keeps_last = rule == "truncate_keep_last"
    skips_padding = rule in SKIPPING
    programs = rows if skips_padding else 0
    if info is not None:
        programs += tiles(rows, ROWS)
    for entry, (kind, _, width, _, _) in zip(entries, layouts, strict=True):
        tokens = rows if kind == Kind.ROW else plan.tokens
        programs += tiles(tokens * entry.units // width, GROUPS)
    mask = None
    if attention_mask is not None and (skips_padding or info is not None):
        mask = attention_mask.ne(0) if attention_mask.is_complex() else attention_mask
    bundles, bundle_layouts = bundle(entries, layouts)
    resize_kernel[(programs,)](
        bundles,
        info,
        mask,
        *((0, 0) if mask is None else mask.stride()),
        rows,
        plan.line // plan.new_length,
        *plan,
        LAYOUTS=bundle_layouts,
        PADS=rule == "reshape_pad",
        MOVES=rule == "reshape_overlap",
        SKIPS_PADDING=skips_padding,
        KEEPS_LAST=keeps_last,
        GROUPS=GROUPS,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        enable_fp_fusion=True,
    )


def resize_batch(*arguments: Any) -> list[Tensor]:
    outputs = allocate(*arguments)
    resize_batch_out(*arguments, outputs)  # type: ignore[call-arg]
    return outputs


LIBRARY.impl("resize_batch.triton", resize_batch, DISPATCH_KEY)
LIBRARY.impl("resize_batch_out.triton", resize_batch_out, DISPATCH_KEY)
