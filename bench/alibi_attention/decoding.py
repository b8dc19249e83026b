"""Decoding: one query over a long cache, beside SDPA with a dense mask that was made before.

CPUs of another kind have records of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes

from ..common.records import CpuRecord, cpu_kind, in_turns, save, table
from ..common.timing import Call
from .peers import FLASH, MASK, OURS, OURS_NO_SKIP, Attend
from .problems import Problem, draw
from .report import DECODING

OURS_BOUND = f"{OURS}, key_norm_bound"
#: Query heads, key heads, head_dim.
HEADS = ((12, 12, 64), (32, 8, 128))
BATCHES, KEYS = (1, 8), (1024, 2048, 4096, 8192, 16384)
PEERS = (OURS, OURS_BOUND, OURS_NO_SKIP, MASK.name, FLASH.name)
SECONDS = 0.5  #: of measuring, for each record


def inputs_of(problem: Problem, kind: str, device: torch.device) -> list[Tensor]:
    """One query, and `problem.length` keys and values."""
    _, key, value = draw(replace(problem, heads=problem.key_heads), kind, device)
    query = torch.randn(problem.batch_size, problem.heads, 1, problem.head_dim, device=device)
    query *= 3 if kind == "b" else 1
    return [query.to(problem.dtype), key.detach(), value.detach()]


def peers_of(problem: Problem, key: Tensor) -> dict[str, Attend]:
    shared = problem.heads != problem.key_heads
    mask = alibi_bias(alibi_slopes(problem.heads, device=key.device), 1, problem.length)[None].to(problem.dtype)
    bound = key.float().norm(dim=-1).amax(-1)
    sdpa = partial(scaled_dot_product_attention, enable_gqa=shared)
    return {
        OURS: alibi_attention,
        OURS_BOUND: partial(alibi_attention, key_norm_bound=bound),
        OURS_NO_SKIP: partial(alibi_attention, skip_tolerance=0),
        MASK.name: partial(sdpa, attn_mask=mask),
        FLASH.name: sdpa,
    }


def measure(problem: Problem, inputs: str, threads: int, seconds: float) -> Iterator[CpuRecord]:
    """Errors are of the first row, against the reference in float64."""
    tensors = inputs_of(problem, inputs, torch.device("cpu"))
    attends = peers_of(problem, tensors[1])
    exact = alibi_attention(*(tensor[:1].double() for tensor in tensors), backend="reference")
    errors = {
        name: ((attend(*tensors)[:1] - exact).abs().max() / exact.abs().max()).item()
        for name, attend in attends.items()
        if name != FLASH.name
    }
    calls: dict[str, Call] = {name: partial(attend, *tensors) for name, attend in attends.items()}
    facts = {**problem.facts(), "dtype": str(problem.dtype), "inputs": inputs}
    case = f"decoding {problem.case()}, inputs {inputs}"
    yield from in_turns(OURS, case, calls, threads, seconds, facts, errors)


def run(seconds: float) -> Iterator[CpuRecord]:
    problems = [
        Problem(batch_size, *heads[:2], keys, heads[2]) for heads in HEADS for batch_size in BATCHES for keys in KEYS
    ]
    for problem in tqdm(problems, desc="decoding", unit="case"):
        for inputs in ("a", "b"):
            yield from measure(problem, inputs, torch.get_num_threads(), seconds)


def main(arguments: argparse.Namespace) -> None:
    save(f"{DECODING}_{cpu_kind()}", run(SECONDS), table)
