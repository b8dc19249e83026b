"""Attention on a GPU beside its peers: lengths, head dims, skipping, segments, grouped heads."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor
from tqdm import tqdm

from seqwarm_kernels import attended_share

from ..common.timing import Call, extra_bytes
from ..gpu.records import Recorder
from . import problems
from .exact import Expected
from .peers import FLEX, FLEX_TUNED, NO_SKIP, Attend, Peer, everyone, ours
from .problems import Problem, draw

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
FLOPS = {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}  # in forwards


def call_of(work: str, attend: Callable[..., Tensor], inputs: list[Tensor], grad_out: Tensor) -> Call:
    if work == FORWARD:
        detached = [tensor.detach() for tensor in inputs]
        return lambda: attend(*detached)
    if work == BACKWARD:
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad_out)


class Case:
    """A problem with its inputs of one kind, drawn and computed in float64 when first needed."""

    def __init__(self, problem: Problem, kind: str, device: torch.device) -> None:
        self.problem, self.kind, self.device = problem, kind, device

    @functools.cached_property
    def inputs(self) -> list[Tensor]:
        return draw(self.problem, self.kind, self.device)

    @functools.cached_property
    def grad_out(self) -> Tensor:
        return torch.randn_like(self.inputs[0])

    @functools.cached_property
    def expected(self) -> Expected:
        return Expected(self.problem, self.inputs, self.grad_out)

    def figures(self, work: str, peer: Peer, attend: Attend) -> dict[str, float]:
        """What is noted beside the time: operations, errors, memory, the share of keys attended."""
        problem = self.problem
        found = {"gflop": problem.flops() * FLOPS[work] / 1e9}
        if work == FORWARD:
            found["moved_megabytes"] = problem.moved_bytes() / 1e6
            if peer.has_bias:
                found |= self._error(attend(*(tensor.detach() for tensor in self.inputs)))
            if peer.name.startswith("alibi_attention") and not peer.name.endswith(NO_SKIP):
                found["attended_share"] = self._share()
        elif work == BOTH:
            if peer.has_bias:
                out = attend(*self.inputs)
                found |= self._error(out, torch.autograd.grad(out, self.inputs, self.grad_out))
                del out
            if (extra := extra_bytes(call_of(work, attend, self.inputs, self.grad_out))) is not None:
                found["extra_megabytes"] = extra / 1e6
        return found

    def _error(self, out: Tensor, grads: tuple[Tensor, ...] = ()) -> dict[str, float]:
        errors = self.expected.errors(out.detach(), grads)
        return {f"error_{name}": error for name, error in errors.items()}

    def _share(self) -> float:
        detached = [tensor.detach() for tensor in self.inputs]
        options = {"causal": self.problem.causal, "segment_length": self.problem.segment_length}
        return attended_share(*detached, **options).mean().item()  # type: ignore[arg-type]


def compare(recorder: Recorder, stage: str, case: Case, peer: Peer, attend: Callable[[], Attend]) -> None:
    """Every kind of work of one peer on one case."""
    for work in (FORWARD, BOTH, BACKWARD):

        def make(work: str = work) -> tuple[Call, dict[str, float]]:
            made = attend()
            return call_of(work, made, case.inputs, case.grad_out), case.figures(work, peer, made)

        name = case.problem.case()
        recorder.measure(stage, name, work, peer.name, make, inputs=case.kind, facts=case.problem.facts())


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
            attend = functools.cache(functools.partial(peer.make, problem, device))  # compiled once for all kinds
            for case in cases:
                if recorder.over():
                    return
                if peer.name in {wanted.name for wanted in peers_of(problem, case.kind)}:
                    compare(recorder, stage, case, peer, attend)


def long(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """8k and 16k tokens, on both kinds of inputs."""

    def peers(problem: Problem, kind: str) -> list[Peer]:
        return everyone(problem, device) if kind == "a" else [*ours(device, problem.dtype), FLEX]

    _sweep(recorder, device, "long", problems.long(tiny), peers, kinds="ab")


def lengths(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    _sweep(recorder, device, "lengths", problems.lengths(tiny), lambda problem, _: everyone(problem, device))


def segments(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    _sweep(recorder, device, "segments", problems.segments(tiny), lambda problem, _: everyone(problem, device))


def tuned(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """FlexAttention with every configuration that it knows tried, which takes it long."""

    def peers(problem: Problem, _: str) -> list[Peer]:
        return [*ours(device, problem.dtype)[:1], FLEX_TUNED]

    _sweep(recorder, device, "tuned", problems.long(tiny), peers)
