"""Each operator beside the same in plain PyTorch, by pytest-benchmark: `make bench`. On a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from seqwarm_kernels.diagnostics import moment_statistics

from .alibi_attention.cases import BOTH, FORWARD, Case, call_of
from .alibi_attention.peers import EAGER, MASK, Peer, ours
from .alibi_attention.problems import Problem
from .moment_statistics.trainings import Training, read_by_hand
from .resize_batch.implementations import BY_HAND, OURS, Resizing, implementations

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
PROBLEMS = [Problem(2048 // length, 12, 12, length, 64, dtype=DTYPE) for length in (64, 1024)]
PEERS = [ours(DEVICE, DTYPE)[0], MASK, EAGER]
BATCHES = [Resizing(3, rows, tokens, tokens // 2, "truncate") for rows, tokens in ((8, 128), (2048, 2048))]


def _run(benchmark: Any, group: str, call: Callable[[], object]) -> None:
    """Time a call until its results are complete, on the device too."""

    def complete() -> None:
        call()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()

    benchmark.group = group
    benchmark(complete)


@pytest.mark.parametrize("work", [FORWARD, BOTH])
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"S{problem.length}")
@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_attention(benchmark: Any, problem: Problem, peer: Peer, work: str) -> None:
    case = Case(problem, "a", DEVICE)
    call = call_of(work, peer.make(problem, DEVICE), case.inputs, case.grad_out)
    _run(benchmark, f"attention, {work}, {problem.case()}", call)


@pytest.mark.parametrize("problem", BATCHES, ids=lambda problem: f"{problem.rows}x{problem.tokens}")
@pytest.mark.parametrize("name", [OURS, BY_HAND])
def test_resize_batch(benchmark: Any, problem: Resizing, name: str) -> None:
    makers = implementations(problem, problem.batch(DEVICE), compiled=False)
    _run(benchmark, problem.case(), makers[name]())


@pytest.mark.parametrize("read", [moment_statistics, read_by_hand], ids=["fused", "eager"])
def test_moments(benchmark: Any, read: Callable[..., object]) -> None:
    training = Training(4, 4, 112, 16, 256, DEVICE)
    training.step()
    _run(benchmark, f"moments of {training.parameters / 1e6:.1f} M parameters", lambda: read(training.optimizer))
