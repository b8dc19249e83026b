"""Host side of the Triton kernel: from the operator's arguments to one launch.

A kernel is compiled for each set of dtypes, kinds and fill values, and for the number of items that a 16-byte access
may hold. Numbers of tokens and of pieces never cause another compilation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..library import LIBRARY
from ..resize_batch.triton import COLUMNS, GROUPS, ROWS, bundle, fill_bits, running_total, tiles
from ..resize_batch.triton_kernel import TICKET, Info
from ..triton_launch import DISPATCH_KEY, on
from .schema import PackedKind, allocate
from .triton_kernel import PackedEntry, resize_packed_kernel

_WIDEST = 16  # bytes
_MOST_UNITS = 2**30  # 32-bit indices hold the items of a token and a tile


def make_entry(source: Tensor, out: Tensor) -> PackedEntry:
    units = math.prod(out.shape[1:])
    if units > _MOST_UNITS:
        raise ValueError(f"backend='triton' takes tokens of at most {_MOST_UNITS} items, got {tuple(source.shape)}")
    source = source.contiguous()  # one more launch where it is not
    if source.dtype == torch.complex64:  # Triton has no complex dtypes
        source, out = source.view(torch.int64), out.view(torch.int64)
    return PackedEntry(source, out, units)


def make_layout(entry: PackedEntry, kind: int, fill_value: float, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Kind, bytes of an item, items of a group, bits of the fill value."""
    limits = _WIDEST // entry.source.element_size() | entry.units
    bits = fill_bits(fill_value, str(fill_value), dtype) if kind == PackedKind.LABEL else 0
    return int(kind), entry.source.element_size(), limits & -limits, bits


def resize_packed(
    inputs: list[Tensor],
    attention_mask: Tensor | None,
    pieces: Tensor,
    new_tokens: int,
    kinds: list[int],
    fill_values: list[float],
    return_info: bool,
) -> list[Tensor]:
    outputs = allocate(inputs, attention_mask, pieces, new_tokens, kinds, fill_values, return_info)
    if return_info and new_tokens >= TICKET.value:
        raise ValueError(f"backend='triton' counts fewer than {TICKET.value} tokens, got {new_tokens}")
    count = pieces.shape[1]
    entries, layouts, programs = [], [], 0
    for source, out, kind, fill_value in zip(inputs, outputs, kinds, fill_values, strict=False):
        if out.numel() == 0:
            continue
        entries.append(make_entry(source, out))
        layouts.append(make_layout(entries[-1], kind, fill_value, source.dtype))
        programs += tiles(out.numel() // layouts[-1][2], GROUPS)
    if return_info and count == 0:
        outputs[-1].zero_()
    elif return_info:
        programs += tiles(count, ROWS)
    if programs == 0:
        return outputs
    mask = attention_mask if return_info else None
    if mask is not None and mask.is_complex():
        mask = mask.ne(0)
    with on(pieces.device):
        info = Info(outputs[-3], outputs[-2], outputs[-1], running_total(pieces.device)) if return_info else None
        bundles, bundle_layouts = bundle(entries, layouts)
        resize_packed_kernel[(programs,)](
            bundles,
            info,
            mask,
            pieces,
            0 if mask is None else mask.stride(0),
            count,
            1 << count.bit_length() - 1,
            new_tokens,
            LAYOUTS=bundle_layouts,
            GROUPS=GROUPS,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            enable_fp_fusion=True,
        )
    return outputs


LIBRARY.impl("resize_packed.triton", resize_packed, DISPATCH_KEY)
