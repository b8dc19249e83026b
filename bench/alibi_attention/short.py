"""Attention on the CPU where warmup begins: rows of 8 to 256 tokens, in both layouts, beside torch's own; and segments
of one row beside the same tokens as rows.

CPUs of another kind have records of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from tqdm import tqdm

from ..common.records import CpuRecord, cpu_kind, in_turns, save, table
from . import segments
from .cases import BOTH, FORWARD, Case, call_of
from .cpu import CPU, case_of, problem_of
from .peers import EAGER, FLASH, MASK, OURS, ours
from .report import SEGMENTS, SHORT

LENGTHS = (8, 16, 32, 64, 128, 256)
DTYPES = (torch.float32, torch.bfloat16)
SECONDS = 1.0  #: of measuring, for each record


def tokens_first(tensor: Tensor) -> Tensor:
    """The same (B, H, S, D) values, in memory as (B, S, H, D), as projections return them."""
    copy = tensor.detach().transpose(1, 2).contiguous().transpose(1, 2)
    return copy.requires_grad_(tensor.requires_grad)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {"tokens first": tokens_first, "heads first": Tensor.contiguous}


def measure(length: int, dtype: torch.dtype, layout: str, threads: int, seconds: float) -> Iterator[CpuRecord]:
    problem = problem_of(length, dtype=dtype)
    case = Case(problem, "a", CPU)
    inputs = [LAYOUTS[layout](tensor) for tensor in case.inputs]
    grad_out = LAYOUTS[layout](case.grad_out)
    peers = (ours(CPU, dtype)[0], MASK, FLASH, EAGER)
    attends = {peer.name: peer.make(problem, CPU) for peer in peers}
    errors = {
        peer.name: case.exact.errors(attends[peer.name](*inputs).detach())["out"] for peer in peers if peer.has_bias
    }
    for work in (FORWARD, BOTH):
        calls = {name: call_of(work, attend, inputs, grad_out) for name, attend in attends.items()}
        facts = {**problem.facts(), "dtype": str(dtype), "work": work, "layout": layout}
        title = f"{case_of(problem, work, 'a')}, {layout}"
        yield from in_turns(OURS, title, calls, threads, seconds, facts, errors if work == FORWARD else {})


def run(seconds: float) -> Iterator[CpuRecord]:
    cases = [(length, dtype, layout) for dtype in DTYPES for layout in LAYOUTS for length in LENGTHS]
    for length, dtype, layout in tqdm(cases, desc="short attention", unit="case"):
        yield from measure(length, dtype, layout, torch.get_num_threads(), seconds)


def main(arguments: argparse.Namespace) -> None:
    save(f"{SHORT}_{cpu_kind()}", run(SECONDS), table)
    save(f"{SEGMENTS}_{cpu_kind()}", segments.run(SECONDS), segments.segments_table)
