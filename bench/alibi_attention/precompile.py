"""Compiles slow kernels once for every problem, so that later processes find the kernels in the caches on disk.

`python -m bench.alibi_attention.precompile PART SHARE SHARES`: every SHARES-th peer of a problem, from SHARE on.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import torch

from ..gpu.records import explain
from . import hopper, problems
from .cases import BOTH, FORWARD, call_of
from .peers import Peer, flex_peers, ours
from .problems import Problem


def _of_peers(tiny: bool, device: torch.device) -> Iterator[tuple[Problem, Peer, str | None]]:
    for problem in (*problems.long(tiny), *problems.segments(tiny), *problems.lengths(tiny)):
        for peer in (*ours(device, problem.dtype)[:1], *flex_peers(problem)):
            yield problem, peer, None


def _of_hopper(tiny: bool, device: torch.device) -> Iterator[tuple[Problem, Peer, str | None]]:
    for head_dim in hopper.HEAD_DIMS:
        for causal in (True, False):
            problem = replace(problems.of_length(1024, head_dim), causal=causal)
            yield from ((problem, ours(device, problem.dtype)[0], name) for name in (hopper.GLUON, hopper.TRITON))


def main(part: str, share: int, shares: int) -> None:
    tiny = not torch.cuda.is_available()
    device = torch.device("cpu" if tiny else "cuda")
    calls = (_of_hopper if part == "hopper" else _of_peers)(tiny, device)
    for problem, peer, kernels in [*calls][share::shares]:
        inputs = problems.draw(problem, "a", device)
        try:
            with hopper.served_by(kernels) if kernels else nullcontext():
                attend = peer.make(problem, device)
                for work in (FORWARD, BOTH):
                    call_of(work, attend, inputs, torch.randn_like(inputs[0]))()
            outcome = "compiled"
        except Exception as error:  # the measurement records the same failure
            outcome = explain(error)
        print(f"{problem.case()}, {peer.name}: {outcome}", flush=True)
        del inputs
        if not tiny:
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
