"""On a Hopper GPU: the Gluon kernels beside those in Triton, at every length, with and without skipping, and cuDNN's.

`python -m bench.alibi_attention.hopper SHARE SHARES` compiles every SHARES-th kind of call, from SHARE on.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from tqdm import tqdm

from seqwarm_kernels import alibi_attention
from seqwarm_kernels.attention.calls import DEFAULT_SKIP_TOLERANCE

from ..common.timing import Call
from ..gpu.records import DeviceRecords, Recorder, speedup, teraflops
from . import problems
from .cases import BACKWARD, FORWARD, call_of
from .gpu import FLOPS
from .peers import CUDNN
from .problems import Problem

STAGE = "hopper"
GLUON, TRITON = "a producer and two consumers", "Triton"
_HEAD_DIMS, _LENGTHS, _FULL = (128, 64), (8192, 4096, 1024, 16384, 2048, 512), 8192


def hopper(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    for problem in tqdm([problems.TINY] if tiny else list(_problems()), desc=STAGE, unit="problem"):
        inputs = problems.draw(problem, "a", device)
        grad_out = torch.randn_like(inputs[0])
        for name in (GLUON, TRITON, CUDNN.name):
            for tolerance in (0.0,) if name == CUDNN.name else (0.0, DEFAULT_SKIP_TOLERANCE):
                _measure(recorder, problem, name, tolerance, inputs, grad_out, device)


def _problems() -> Iterator[Problem]:
    for length in _LENGTHS:
        for head_dim in _HEAD_DIMS:
            yield problems.of_length(length, head_dim)
            if length == _FULL:
                yield replace(problems.of_length(length, head_dim), causal=False)


def _measure(
    recorder: Recorder, problem: Problem, name: str, tolerance: float, inputs: Any, grad_out: Any, device: torch.device
) -> None:
    if name == CUDNN.name:
        attend = CUDNN.make(problem, device)
    else:
        choose_kernels(name)
        attend = functools.partial(alibi_attention, causal=problem.causal, skip_tolerance=tolerance)
    for work in (FORWARD, BACKWARD):

        def make(work: str = work) -> tuple[Call, dict[str, float]]:
            return call_of(work, attend, inputs, grad_out), {"gflop": problem.flops() * FLOPS[work] / 1e9}

        facts = problem.facts() | {"skipping": tolerance > 0}
        case = f"{problem.case()}, skipping" if tolerance else problem.case()
        recorder.measure(STAGE, case, work, name, make, facts=facts)


def choose_kernels(name: str) -> None:
    """GLUON or TRITON serves calls of every length."""
    host: Any = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton")
    table: Any = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton_configurations")
    first = 1 if name == GLUON else 2**31
    for head_dim, tiles in table._GLUON.items():
        table._GLUON[head_dim] = tiles._replace(forward_from=first, skipping_from=first, backward_from=first)
    host._known.clear()


def summary_lines(records: DeviceRecords) -> Iterator[str]:
    """A line for each case: TFLOP/s, counted as if no key was skipped, and the speed relative to Triton's kernels."""
    for record in records.of_stages(STAGE).all:
        rate, speed = teraflops(record), speedup(record, records.beside(record, TRITON))
        if record.implementation == GLUON and rate is not None and speed is not None:
            yield f"     {record.case:<42} {record.work:<9} {rate:>6.0f} TFLOP/s  {speed:.2f} times Triton's speed"


def main(share: int, shares: int) -> None:
    kinds = [
        (replace(problems.of_length(1024, head_dim), causal=causal), name)
        for head_dim in _HEAD_DIMS
        for causal in (True, False)
        for name in (GLUON, TRITON)
    ]
    for problem, name in kinds[share::shares]:
        choose_kernels(name)
        inputs = problems.draw(problem, "a", torch.device("cuda"))
        attend = functools.partial(alibi_attention, causal=problem.causal)
        for work in (FORWARD, BACKWARD):
            call_of(work, attend, inputs, torch.randn_like(inputs[0]))()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
