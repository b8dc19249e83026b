"""Attention on a GPU beside its peers: lengths, head dims, skipping, segments, packed sequences, launches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from tqdm import tqdm

from seqwarm_kernels import alibi_attention_varlen, alibi_slopes, attended_share

from ..common.timing import Call, extra_device_bytes
from ..gpu.records import Recorder
from . import decoding as one_query
from . import problems
from .cases import BACKWARD, BOTH, FORWARD, Case, call_of, exact_attention
from .peers import FLASH, FLEX, NO_SKIP, OURS, Attend, Peer, all_peers, flex_documents, ours
from .problems import Problem

FLOPS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  #: floating-point operations, relative to a forward
PACKED_HEADS, PACKED_HEAD_DIM = 12, 64


# ---- dense calls


def _figures(case: Case, work: str, peer: Peer, attend: Attend) -> dict[str, float]:
    """Figures to record beside the time: operations, errors, memory, share of keys attended."""
    problem = case.problem
    found = {"gflop": problem.flops() * FLOPS[work] / 1e9}
    detached = [tensor.detach() for tensor in case.inputs]
    if work == FORWARD:
        found["moved_megabytes"] = problem.moved_bytes() / 1e6
        if peer.has_bias:
            found |= _errors(case, attend(*detached))
        if peer.name.startswith(OURS) and not peer.name.endswith(NO_SKIP):
            shares = attended_share(*detached, causal=problem.causal, segment_length=problem.segment_length)
            found["attended_share"] = shares.mean().item()
    elif work == BOTH:
        if peer.has_bias:
            out = attend(*case.inputs)
            found |= _errors(case, out, torch.autograd.grad(out, case.inputs, case.grad_out))
            del out
        if (extra := extra_device_bytes(call_of(work, attend, case.inputs, case.grad_out))) is not None:
            found["extra_megabytes"] = extra / 1e6
    return found


def _errors(case: Case, out: Tensor, grads: tuple[Tensor, ...] = ()) -> dict[str, float]:
    return {f"error_{name}": error for name, error in case.exact.errors(out.detach(), grads).items()}


def _measure(
    recorder: Recorder,
    stage: str,
    case: str,
    name: str,
    make_attend: Callable[[], Attend],
    tensors: Callable[[], tuple[list[Tensor], Tensor]],
    figures: Callable[[str, Attend], dict[str, float]],
    works: tuple[str, ...] = (FORWARD, BOTH, BACKWARD),
    **described: Any,
) -> None:
    """Measures a peer. `tensors` are the inputs and the gradient of the output, made when they are needed."""
    for work in works:

        def make(work: str = work) -> tuple[Call, dict[str, float]]:
            attend, (inputs, grad_out) = make_attend(), tensors()
            return call_of(work, attend, inputs, grad_out), figures(work, attend)

        recorder.measure(stage, case, work, name, make, **described)


def _compare(recorder: Recorder, stage: str, case: Case, peer: Peer, make_attend: Callable[[], Attend]) -> None:
    _measure(
        recorder, stage, case.problem.case(), peer.name, make_attend, lambda: (case.inputs, case.grad_out),
        lambda work, attend: _figures(case, work, peer, attend), inputs=case.kind, facts=case.problem.facts(),
    )  # fmt: skip


def _sweep(
    recorder: Recorder,
    device: torch.device,
    stage: str,
    chosen: list[Problem],
    peers_of: Callable[[Problem, str], list[Peer]],
    kinds: str = "a",
) -> None:
    for problem in tqdm(chosen, desc=stage, unit="problem"):
        cases = [Case(problem, kind, device) for kind in kinds]
        peers = {peer.name: peer for case in cases for peer in peers_of(problem, case.kind)}
        for peer in peers.values():
            make_attend = functools.cache(functools.partial(peer.make, problem, device))  # compiled once for all kinds
            for case in cases:
                if recorder.out_of_time():
                    return
                if peer.name in {wanted.name for wanted in peers_of(problem, case.kind)}:
                    _compare(recorder, stage, case, peer, make_attend)


def paths(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Our kernels without skipping, then with it, without and with a mask."""
    _sweep(recorder, device, "paths", problems.paths(tiny), lambda problem, _: ours(device, problem.dtype)[::-1])


def long(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """8k and 16k tokens, on both kinds of inputs."""

    def peers(problem: Problem, kind: str) -> list[Peer]:
        return all_peers(problem, device) if kind == "a" else [*ours(device, problem.dtype), FLEX]

    _sweep(recorder, device, "long", problems.long(tiny), peers, kinds="ab")


def lengths(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    _sweep(recorder, device, "lengths", problems.lengths(tiny), lambda problem, _: all_peers(problem, device))


def segments(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    _sweep(recorder, device, "segments", problems.segments(tiny), lambda problem, _: all_peers(problem, device))


# ---- packed sequences


def packed(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Packed causal sequences of 64 to 2048 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(4, 40, (6,)) if tiny else torch.randint(64, 2049, (32,), generator=generator)
    cu_seqlens = torch.cat([torch.zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    tokens, longest = int(lengths.sum()), int(lengths.max())
    dtype = torch.float32 if tiny else torch.bfloat16
    shape = tokens, PACKED_HEADS, PACKED_HEAD_DIM
    inputs = [torch.randn(shape, device=device).to(dtype).requires_grad_() for _ in range(3)]
    grad_out = torch.randn_like(inputs[0])
    gflop = 2.0 * PACKED_HEADS * PACKED_HEAD_DIM * float((lengths.double() ** 2).sum()) / 1e9
    case = (
        f"{len(lengths)} sequences of {int(lengths.min())} to {longest}, {tokens} tokens, "
        f"H{PACKED_HEADS} D{PACKED_HEAD_DIM}"
    )
    for name, make_attend in _packed_peers(cu_seqlens, longest, tokens).items():

        def figures(work: str, attend: Attend, name: str = name) -> dict[str, float]:
            error = {} if "no bias" in name else _packed_error(attend, inputs, grad_out, cu_seqlens)
            return {"gflop": gflop * FLOPS[work], **error}

        _measure(recorder, "packed", case, name, functools.cache(make_attend), lambda: (inputs, grad_out), figures)


def _packed_peers(cu_seqlens: Tensor, longest: int, tokens: int) -> dict[str, Callable[[], Attend]]:
    slopes = alibi_slopes(PACKED_HEADS, device=cu_seqlens.device)

    def varlen() -> Attend:
        return lambda q, k, v: alibi_attention_varlen(q, k, v, cu_seqlens, cu_seqlens, longest, longest, slopes)

    def flex() -> Attend:
        attend = flex_documents(cu_seqlens, slopes, tokens)
        return lambda q, k, v: attend(*(t.transpose(0, 1)[None] for t in (q, k, v)))[0].transpose(0, 1)

    def flash() -> Attend:
        attend: Any = varlen_attn
        return lambda q, k, v: attend(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0))

    return {
        "alibi_attention_varlen": varlen,
        "FlexAttention, document mask": flex,
        "torch varlen_attn, no bias": flash,
    }


def _packed_error(attend: Attend, inputs: list[Tensor], grad_out: Tensor, cu_seqlens: Tensor) -> dict[str, float]:
    """Error of the first head on the first sequence."""
    first = slice(0, int(cu_seqlens[1]))
    out = attend(*(tensor.detach() for tensor in inputs))[first, 0].double()
    query, key, value, grad = (tensor.detach()[first, 0].double()[None] for tensor in (*inputs, grad_out))
    slopes = alibi_slopes(PACKED_HEADS, device=out.device).double()[:1]
    expected = exact_attention(query[None], key, value, grad[None], slopes, causal=True)[0][0, 0]
    return {"error_out": ((out - expected).abs().max() / expected.abs().max()).item()}


# ---- decoding


def decoding(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """One query over a long cache, beside SDPA with a mask that was made before."""
    for problem in problems.decoding(tiny):
        inputs = functools.cache(functools.partial(one_query.inputs_of, problem, "a", device))
        for name in one_query.PEERS:

            def make(
                name: str = name, problem: Problem = problem, inputs: Callable[[], list[Tensor]] = inputs
            ) -> tuple[Call, dict[str, float]]:
                tensors = inputs()
                attend = one_query.peers_of(problem, tensors[1])[name]
                return functools.partial(attend, *tensors), {"moved_megabytes": 2 * tensors[1].nbytes / 1e6}

            recorder.measure("decoding", problem.case(), FORWARD, name, make, facts=problem.facts())


# ---- cost of a call for the caller


def host(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Small tensors: what counts is `host_ms`, the time that the caller spends on a call."""
    problem = Problem(2, 4, 4, 64, 64, dtype=torch.float32 if tiny else torch.bfloat16)
    _sweep(recorder, device, "host", [problem], lambda problem, _: [ours(device, problem.dtype)[0], FLASH, FLEX])
