"""On a Hopper GPU: the Gluon kernels beside those in Triton, at every length, with and without skipping, and peers."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.attention.calls import DEFAULT_SKIP_TOLERANCE

from ..common.timing import Call
from ..gpu.records import Recorder
from . import problems
from .cases import BACKWARD, FORWARD, Case, call_of
from .gpu import FLOPS
from .peers import Attend, Peer, hopper_peers
from .problems import Problem
from .short import tokens_first

STAGE = "hopper"
GLUON, TRITON = "a producer and two consumers", "Triton"
HEAD_DIMS, _LENGTHS, _FULL = (128, 64), (8192, 4096, 1024, 16384, 2048, 512), 8192


def hopper(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    for problem in tqdm([problems.TINY] if tiny else list(_problems()), desc=STAGE, unit="problem"):
        case = Case(problem, "a", device)
        for name in (GLUON, TRITON):
            for tolerance in (0.0, DEFAULT_SKIP_TOLERANCE):
                _measure(recorder, case, name, tolerance)
        for peer in hopper_peers():
            _measure(recorder, case, peer.name, 0.0, peer)


def _problems() -> Iterator[Problem]:
    for length in _LENGTHS:
        for head_dim in HEAD_DIMS:
            yield problems.of_length(length, head_dim)
            if length == _FULL:
                yield replace(problems.of_length(length, head_dim), causal=False)


def _measure(recorder: Recorder, case: Case, name: str, tolerance: float, peer: Peer | None = None) -> None:
    problem = case.problem
    facts = problem.facts() | {"skipping": tolerance > 0}
    title = f"{problem.case()}, skipping" if tolerance else problem.case()

    def make(work: str) -> tuple[Call, dict[str, float]]:
        attend: Attend = functools.partial(alibi_attention, causal=problem.causal, skip_tolerance=tolerance)
        inputs, grad_out = case.inputs, case.grad_out
        if peer is not None:
            attend = peer.make(problem, case.device)
            if peer.token_major:
                *inputs, grad_out = map(tokens_first, (*inputs, grad_out))
        figures = {"gflop": problem.flops() * FLOPS[work] / 1e9}
        return call_of(work, attend, inputs, grad_out), figures

    with served_by(name):
        for work in (FORWARD, BACKWARD):
            recorder.measure(STAGE, title, work, name, functools.partial(make, work), facts=facts)


@contextmanager
def served_by(name: str) -> Iterator[None]:
    """GLUON serves calls of every length, or none."""
    host: Any = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton")
    table: Any = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton_configurations")
    first = 1 if name == GLUON else 2**31
    before = dict(table._GLUON)
    for head_dim, tiles in before.items():
        table._GLUON[head_dim] = tiles._replace(forward_from=first, skipping_from=first, backward_from=first)
    host._known.clear()
    try:
        yield
    finally:
        table._GLUON.update(before)
        host._known.clear()
