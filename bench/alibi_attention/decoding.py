"""Decoding: one query over a long cache, beside SDPA with a dense mask that was made before.

Peers take turns, so that all have the machine in the same states. CPUs of another kind have records of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from tqdm import tqdm

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes

from ..common.records import CpuRecord, cpu_kind, table, write
from ..common.timing import measure_in_turns
from .peers import FLASH, MASK, OURS, OURS_NO_SKIP
from .problems import Problem, draw
from .report import DECODING

OURS_BOUND = f"{OURS}, key_norm_bound"
#: Query heads, key heads, head_dim.
HEADS = ((12, 12, 64), (32, 8, 128))
BATCHES, KEYS = (1, 8), (1024, 2048, 4096, 8192, 16384)
PEERS = (OURS, OURS_BOUND, OURS_NO_SKIP, MASK.name, FLASH.name)
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


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
    timings = measure_in_turns({name: _call(attends[name], tensors) for name in attends}, threads, seconds)
    for name, timing in timings.items():
        error = (attends[name](*tensors)[:1] - exact).abs().max() / exact.abs().max()
        facts = {**problem.facts(), "dtype": str(problem.dtype), "inputs": inputs}
        case = f"decoding {problem.case()}, inputs {inputs}"
        shown = None if name == FLASH.name else error.item()
        yield CpuRecord(OURS, case, name, threads, timing.median, timing.iqr, shown, facts)


def _call(attend: Attend, tensors: list[Tensor]) -> Callable[[], Tensor]:
    return lambda: attend(*tensors)


def run(seconds: float) -> Iterator[CpuRecord]:
    problems = [
        Problem(batch_size, *heads[:2], keys, heads[2]) for heads in HEADS for batch_size in BATCHES for keys in KEYS
    ]
    for problem in tqdm(problems, desc="decoding", unit="case"):
        for inputs in ("a", "b"):
            yield from measure(problem, inputs, torch.get_num_threads(), seconds)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0.5, help="time of a record (default: %(default)s seconds)")


def main(arguments: argparse.Namespace) -> None:
    path, records = write(f"{DECODING}_{cpu_kind()}", run(arguments.seconds))
    print(f"{table(records)}\n\nwritten to {path}")
