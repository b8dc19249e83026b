"""Segments of a row on the CPU, as `segment_length` and as boundaries, beside the same tokens cut into rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from seqwarm_kernels import alibi_attention, alibi_attention_varlen

from ..common.records import CpuRecord, in_turns
from ..common.timing import Call
from .cases import BOTH, FORWARD, call_of
from .report import by_dtype_and_work

LENGTHS = (8, 16, 32, 64, 128, 256, 512)
DTYPES = (torch.float32, torch.bfloat16)
TOKENS, HEADS, HEAD_DIM = 16384, 12, 64
ROWS, SEGMENT_LENGTH, BOUNDARIES = "rows", "segment_length", "cu_seqlens"


def measure(length: int, dtype: torch.dtype, threads: int, seconds: float, tokens: int = TOKENS) -> Iterator[CpuRecord]:
    """`cu_seqlens` has room for segments of 8 tokens, as for the whole of a ramp, and the row's length as a bound."""
    room = tokens // LENGTHS[0] + 1
    ends = (torch.arange(room, dtype=torch.int32) * length).clamp_(max=tokens)
    attends: dict[str, Callable[..., Tensor]] = {
        ROWS: alibi_attention,
        SEGMENT_LENGTH: functools.partial(alibi_attention, segment_length=length),
        BOUNDARIES: functools.partial(_by_boundaries, ends=ends, tokens=tokens),
    }
    torch.manual_seed(0)
    memory = [torch.randn(tokens, HEADS, HEAD_DIM).to(dtype) for _ in range(4)]  # as projections return it
    for work in (FORWARD, BOTH):
        calls: dict[str, Call] = {}
        for name, attend in attends.items():
            shape = {ROWS: (tokens // length, length), SEGMENT_LENGTH: (1, tokens), BOUNDARIES: (tokens,)}[name]
            tensors = [tensor.view(*shape, HEADS, HEAD_DIM) for tensor in memory]
            *inputs, grad_out = tensors if name == BOUNDARIES else [tensor.transpose(1, 2) for tensor in tensors]
            calls[name] = call_of(work, attend, [tensor.detach().requires_grad_() for tensor in inputs], grad_out)
        facts = {"length": length, "dtype": str(dtype), "work": work}
        yield from in_turns("segments", f"{work}, segments of {length}, {dtype}", calls, threads, seconds, facts)


def _by_boundaries(query: Tensor, key: Tensor, value: Tensor, *, ends: Tensor, tokens: int) -> Tensor:
    return alibi_attention_varlen(query, key, value, ends, ends, tokens, tokens)


def run(seconds: float) -> Iterator[CpuRecord]:
    cases = [(length, dtype) for dtype in DTYPES for length in LENGTHS]
    for length, dtype in tqdm(cases, desc="segments", unit="case"):
        yield from measure(length, dtype, torch.get_num_threads(), seconds)


def segments_table(records: list[CpuRecord]) -> str:
    """Times of rows, and how many times as long segments take."""
    times = {(r.facts["length"], r.facts["dtype"], r.facts["work"], r.implementation): r.median_ms for r in records}

    def cell(length: int, dtype: str, work: str) -> str:
        rows, *others = (times[length, f"torch.{dtype}", work, name] for name in (ROWS, SEGMENT_LENGTH, BOUNDARIES))
        return f"{rows:.3g} ms ({', '.join(f'{other / rows:.2f}' for other in others)})"

    return by_dtype_and_work("tokens", {length: length for length, *_ in times}, cell)
