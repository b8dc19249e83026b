"""On a GPU: packed sequences of uneven lengths, and what one call costs the caller."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes

from ..common.timing import Call, host_time
from ..gpu.records import DeviceRecord, Recorder, explain
from . import exact, flex
from .gpu import BACKWARD, BOTH, FORWARD, call_of
from .peers import FLASH, FLEX
from .problems import Problem

HEADS, HEAD_DIM = 12, 64
Packed = Callable[[Tensor, Tensor, Tensor], Tensor]


def packed(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Causal, 64 to 2048 tokens to a sequence."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 40, (6,)) if tiny else torch.randint(64, 2049, (32,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    dtype = torch.float32 if tiny else torch.bfloat16
    inputs = [torch.randn(tokens, HEADS, HEAD_DIM, device=device).to(dtype).requires_grad_() for _ in range(3)]
    grad_out = torch.randn_like(inputs[0])
    gflop = 2.0 * HEADS * HEAD_DIM * float((lengths.double() ** 2).sum()) / 1e9
    case = f"{len(lengths)} sequences of {int(lengths.min())} to {longest}, {tokens} tokens, H{HEADS} D{HEAD_DIM}"
    for name, make_attend in _packers(cu_seqlens, longest, tokens).items():
        attend = functools.cache(make_attend)
        for work in (FORWARD, BOTH, BACKWARD):

            def make(
                name: str = name, work: str = work, attend: Callable[[], Packed] = attend
            ) -> tuple[Call, dict[str, float]]:
                figures = {"gflop": gflop * {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}[work]}
                if "no bias" not in name:
                    figures |= _error(attend(), inputs, grad_out, cu_seqlens)
                return call_of(work, attend(), inputs, grad_out), figures

            recorder.measure("packed", case, work, name, make)


def _packers(cu_seqlens: Tensor, longest: int, tokens: int) -> dict[str, Callable[[], Packed]]:
    slopes = alibi_slopes(HEADS, device=cu_seqlens.device)

    def ours() -> Packed:
        return lambda q, k, v: alibi_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, slopes)

    def flex_documents() -> Packed:
        attend = flex.documents(cu_seqlens, slopes, tokens)
        return lambda q, k, v: attend(*(t.transpose(0, 1)[None] for t in (q, k, v)))[0].transpose(0, 1)

    def flash() -> Packed:
        attend: Any = varlen_attn
        return lambda q, k, v: attend(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))

    return {
        "alibi_attention_varlen": ours,
        "FlexAttention, document mask": flex_documents,
        "torch varlen_attn, no bias": flash,
    }


def _error(attend: Packed, inputs: list[Tensor], grad_out: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """Of the first sequence's first head."""
    first = slice(0, int(cu_seqlens[1]))
    out = attend(*(tensor.detach() for tensor in inputs))[first, 0].double()
    query, key, value, grad = (tensor.detach()[first, 0].double()[None] for tensor in (*inputs, grad_out))
    slopes = alibi_slopes(HEADS, device=out.device).double()[:1]
    expected = exact.attention(query[None], key, value, grad[None], slopes, causal=True)[0][0, 0]
    return {"error_out": ((out - expected).abs().max() / expected.abs().max()).item()}


def host(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Small tensors, without waiting for the device: alone, and with torch's own for comparison."""
    problem = Problem(2, 4, 4, 64, 64, dtype=torch.float32 if tiny else torch.bfloat16)
    inputs = [torch.randn(2, 4, 64, 64, device=device).to(problem.dtype).requires_grad_() for _ in range(3)]
    slopes = alibi_slopes(4, device=device)
    attends: dict[str, Callable[[], Packed]] = {
        "alibi_attention": lambda: functools.partial(alibi_attention, slopes=slopes),
        FLASH.name: lambda: FLASH.make(problem, device),
        FLEX.name: lambda: FLEX.make(problem, device),
    }
    for name, make in attends.items():
        attend = functools.cache(make)
        for work in (FORWARD, BOTH):
            _launch(recorder, problem.case(), work, name, attend, inputs, 5 if tiny else 300)


def _launch(
    recorder: Recorder,
    case: str,
    work: str,
    name: str,
    attend: Callable[[], Packed],
    inputs: list[Tensor],
    repeats: int,
) -> None:
    try:
        timing = host_time(call_of(work, attend(), inputs, torch.randn_like(inputs[0])), repeats)
        recorder.add(DeviceRecord("host", case, work, name, "a", timing.median, timing.low, timing.high))
        torch.cuda.synchronize() if inputs[0].is_cuda else None
    except Exception as error:
        recorder.add(DeviceRecord("host", case, work, name, failure=explain(error)))
