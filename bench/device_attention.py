"""Attention on a GPU: lengths, head dims, skipping, segments, packed sequences, GQA, and the host's share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, alibi_slopes, attended_share

from .device_records import DeviceRecord, Recorder, host_quartiles
from .peers import Peer, Problem, everyone, ours

WORKS = ("forward", "backward", "forward + backward")


def problems(tiny: bool) -> Iterator[tuple[str, Problem]]:
    """What matters most comes first."""
    if tiny:
        yield "causal", Problem(1, 2, 2, 64, 16, dtype=torch.float32)
        yield "segments", Problem(1, 2, 2, 64, 16, segment_length=8, dtype=torch.float32)
        return
    dense = Problem(2, 16, 16, 8192, 128)
    by_length = [replace(dense, batch_size=max(1, 16384 // length), length=length) for length in LENGTHS]
    by_length += [replace(p, heads=32, key_heads=32, head_dim=64) for p in by_length[:4]]
    yield from (("causal", problem) for problem in by_length)
    for segment_length in (8, 64, 256, 16):
        yield "segments", Problem(1, 12, 12, 65536, 64, segment_length=segment_length)
    yield "GQA 4:1", replace(dense, key_heads=4)
    yield from (("full", replace(problem, causal=False)) for problem in by_length[:1])
    yield from (("causal", replace(p, heads=32, key_heads=32, head_dim=64)) for p in by_length[4:9])


LENGTHS = (8192, 16384, 1024, 4096, 128, 2048, 512, 256, 32768)


def draw(problem: Problem, kind: str, device: torch.device) -> list[Tensor]:
    """Input (a): standard normal. Input (b): scores of deviation 3, and one key in a hundred at 4 times the norm."""
    shapes = [(problem.heads,), (problem.key_heads,), (problem.key_heads,)]
    query, key, value = (
        torch.randn(problem.batch_size, *heads, problem.length, problem.head_dim, device=device) for heads in shapes
    )
    if kind == "b":
        query *= 3
        key *= torch.where(torch.rand(problem.length, 1, device=device) < 0.01, 4.0, 1.0)
    return [tensor.to(problem.dtype).requires_grad_() for tensor in (query, key, value)]


def relative_error(out: Tensor, problem: Problem, inputs: list[Tensor], rows: int = 64) -> float:
    """Against float64, for some queries of the first and the last head."""
    chosen = torch.randint(problem.length, (rows,), device=out.device)
    key_index = torch.arange(problem.length, device=out.device)
    slopes = alibi_slopes(problem.heads, device=out.device).double()
    largest = error = 0.0
    for head in (0, problem.heads - 1):
        key_head = head * problem.key_heads // problem.heads
        query = inputs[0][0, head, chosen].detach().double()
        key, value = (tensor[0, key_head].detach().double() for tensor in inputs[1:])
        distance = chosen[:, None] - key_index
        scores = query @ key.mT * problem.head_dim**-0.5 - slopes[head] * distance.abs()
        hidden = distance < 0 if problem.causal else torch.zeros_like(distance, dtype=torch.bool)
        if problem.segment_length is not None:
            hidden = hidden | (chosen[:, None] // problem.segment_length != key_index // problem.segment_length)
        exact = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value
        error = max(error, (out[0, head, chosen].double() - exact).abs().max().item())
        largest = max(largest, exact.abs().max().item())
    return error / largest


def call_of(work: str, attend: Callable[..., Tensor], inputs: list[Tensor]) -> Callable[[], object]:
    if work == "forward":
        detached = [tensor.detach() for tensor in inputs]
        return lambda: attend(*detached)
    out = attend(*inputs)
    grad_out = torch.randn_like(out)
    if work == "backward":
        return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad_out)


FLOPS = {"forward": 1.0, "backward": 2.5, "forward + backward": 3.5}


def sweep(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    for name, problem in tqdm(list(problems(tiny)), desc="attention", unit="problem"):
        kinds = ("a", "b") if name == "causal" and problem.length >= 8192 else ("a",)
        for kind in kinds:
            torch.manual_seed(0)
            inputs = draw(problem, kind, device)
            for peer in everyone() if kind == "a" else [*ours(), *list(everyone())[2:3]]:
                _one(recorder, name, problem, kind, peer, inputs)


def _one(recorder: Recorder, name: str, problem: Problem, kind: str, peer: Peer, inputs: list[Tensor]) -> None:
    case = (
        f"{name}, B{problem.batch_size} H{problem.heads}/{problem.key_heads} S{problem.length} D{problem.head_dim}"
        f"{f' L{problem.segment_length}' if problem.segment_length else ''}, inputs {kind}"
    )
    if problem.score_bytes() > peer.most_score_bytes:
        return
    try:
        attend = peer.make(problem, inputs[0].device)
        figures = _figures(problem, peer, attend, inputs)
    except Exception as error:  # noted once; the other peers go on
        text = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        recorder.add(DeviceRecord("attention", case, "forward", peer.name, problem=text))
        return
    for work in WORKS:

        def make(work: str = work) -> tuple[Callable[[], object], dict[str, float]]:
            return call_of(work, attend, inputs), {**figures, "gflop": problem.flops() * FLOPS[work] / 1e9}

        recorder.measure("attention", case, work, peer.name, make)
    torch.cuda.empty_cache() if inputs[0].is_cuda else None


def _figures(problem: Problem, peer: Peer, attend: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, float]:
    detached = [tensor.detach() for tensor in inputs]
    figures: dict[str, float] = {}
    if peer.has_bias:
        figures["error"] = relative_error(attend(*detached), problem, inputs)
    if peer.name.startswith("alibi_attention") and "skip_tolerance=0" not in peer.name:
        share = attended_share(*detached, causal=problem.causal, segment_length=problem.segment_length)
        figures["attended_share"] = share.mean().item()
    if problem.segment_length is not None:
        figures["megabytes"] = sum(t.numel() * t.element_size() for t in (*inputs, inputs[0])) / 1e6
    return figures


def packed(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Sequences of uneven lengths without padding, beside the same number of tokens in even rows."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 40, (6,), generator=generator) if tiny else torch.randint(64, 2048, (32,))
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    tokens, longest, heads, head_dim = int(lengths.sum()), int(lengths.max()), 12, 64
    dtype = torch.float32 if tiny else torch.bfloat16
    inputs = [torch.randn(tokens, heads, head_dim, device=device).to(dtype).requires_grad_() for _ in range(3)]

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return alibi_attention_varlen(query, key, value, cu_seqlens, cu_seqlens, longest, longest)

    for work in WORKS:

        def make(work: str = work) -> tuple[Callable[[], object], dict[str, float]]:
            return call_of(work, attend, inputs), {"tokens": float(tokens)}

        recorder.measure("packed", f"{len(lengths)} sequences, {tokens} tokens", work, "alibi_attention_varlen", make)


def host_time(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """What one call costs the caller: small tensors, without waiting for the device."""
    dtype = torch.float32 if tiny else torch.bfloat16
    query = torch.randn(2, 4, 64, 64, device=device).to(dtype)
    leaf = query.clone().requires_grad_()
    slopes = alibi_slopes(4, device=device)
    calls: dict[str, Callable[[], Any]] = {
        "forward": lambda: alibi_attention(query, query, query, slopes),
        "forward + backward": lambda: torch.autograd.grad(alibi_attention(leaf, leaf, leaf, slopes).sum(), leaf),
    }
    for work, call in calls.items():
        low, median, high = host_quartiles(call, 5 if tiny else 300)
        torch.cuda.synchronize() if query.is_cuda else None
        recorder.add(DeviceRecord("host", "B2 H4 S64 D64", work, "alibi_attention", median, low, high))
