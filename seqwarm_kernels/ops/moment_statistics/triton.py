"""Host side of the Triton kernel: a table of all tensors on the device, and one launch."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...utils.devices import is_capturing
from ..library import LIBRARY
from ..triton_launch import DISPATCH_KEY, on
from .schema import Statistic, any_tensor, real
from .triton_kernel import moment_kernel

BLOCK, STEPS = 2048, 8  # a chunk is STEPS blocks of BLOCK elements
SEARCH = 512  # number of table entries, or of results, that a program reads at a time
CHUNK = BLOCK * STEPS
_ALIGNMENT = 16  # bytes
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the kernel's codes


class Table(NamedTuple):
    """The table of tensors that the kernel reads, and the ranges of chunks of the three lists."""

    entries: Tensor  #: (5, tensors), on the device; the kernel names the rows
    momentum_from: int  #: first chunk of momentum; chunks of second moments come before
    gradients_from: int  #: first chunk of gradients
    chunks: int
    groups: int  #: of SEARCH chunks
    tickets: Tensor  #: (groups + 1,), zeros. Launches of one stream never overlap, so they share it


class Span(NamedTuple):
    """The memory of a tensor."""

    address: int
    elements: int
    dtype: torch.dtype


@functools.lru_cache(maxsize=8)
def make_table(lists: tuple[tuple[Span, ...], ...], device: torch.device, stream: int | None) -> Table:
    """The table of these tensors. Cached for each stream: tensors mostly keep their addresses between steps."""
    rows, ends, chunks = [], [], 0
    for spans in lists:
        for span in spans:
            offset = span.address % _ALIGNMENT
            lead = offset // span.dtype.itemsize
            end = lead + span.elements
            rows.append((span.address - offset, lead, end, chunks, _DTYPES.index(span.dtype)))
            chunks += triton.cdiv(end, CHUNK)
        ends.append(chunks)
    entries = torch.tensor(rows, device="cpu").view(len(rows), 5).t().contiguous()
    if device.type == "cuda":
        entries = entries.pin_memory().to(device, non_blocking=True)
    groups = triton.cdiv(chunks, SEARCH)
    tickets = torch.zeros(groups + 1, dtype=torch.int32, device=device)
    return Table(entries, ends[0], ends[1], chunks, groups, tickets)


def as_read(tensor: Tensor) -> Tensor:
    """The tensor as the kernel reads it: real, contiguous, and of a supported dtype."""
    tensor = real(tensor).contiguous()
    return tensor if tensor.dtype in _DTYPES else tensor.float()


def moment_statistics(momentum: list[Tensor], second_moment: list[Tensor], gradients: list[Tensor]) -> Tensor:
    device = any_tensor(momentum, second_moment, gradients).device
    stream = None
    if is_capturing(device):
        raise RuntimeError(
            "moment_statistics cannot be captured in a CUDA graph: the host looks up addresses in each call"
        )
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device).cuda_stream
    lists = [[as_read(tensor) for tensor in tensors] for tensors in (second_moment, momentum, gradients)]
    spans = tuple(
        tuple(Span(tensor.data_ptr(), size, tensor.dtype) for tensor in tensors if (size := tensor.numel()))
        for tensors in lists
    )
    with on(device):  # pinning memory makes a context on the current device
        table = make_table(spans, device, stream)
    out = torch.zeros(len(Statistic), dtype=torch.float64, device=device)
    if table.chunks == 0:
        return out
    results = table.chunks + len(lists) * table.groups
    totals = torch.empty(results, dtype=torch.float64, device=device)
    maxima = torch.empty(results, dtype=torch.float32, device=device)
    with on(device):
        moment_kernel[(table.chunks,)](
            table.entries,
            totals,
            maxima,
            table.tickets,
            out,
            table.entries.shape[1],
            table.momentum_from,
            table.gradients_from,
            table.chunks,
            BLOCK=BLOCK,
            STEPS=STEPS,
            SEARCH=SEARCH,
            enable_fp_fusion=True,
        )
    return out


LIBRARY.impl("moment_statistics.triton", moment_statistics, DISPATCH_KEY)
