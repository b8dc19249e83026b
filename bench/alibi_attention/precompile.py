"""Compiles slow kernels once for every problem, so that later processes find the kernels in the caches on disk.

`python -m bench.alibi_attention.precompile SHARE SHARES`: this process takes every SHARES-th problem, from SHARE on.
"""

from __future__ import annotations

import sys

import torch

from ..gpu.records import explain
from . import problems
from .cases import BOTH, FORWARD, call_of
from .peers import flex_peers, ours


def main(share: int, shares: int) -> None:
    tiny = not torch.cuda.is_available()
    device = torch.device("cpu" if tiny else "cuda")
    everything = [*problems.long(tiny), *problems.segments(tiny), *problems.lengths(tiny)]
    for problem in everything[share::shares]:
        inputs = problems.draw(problem, "a", device)
        for peer in [*ours(device, problem.dtype)[:1], *flex_peers(problem)]:
            try:
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
    main(int(sys.argv[1]), int(sys.argv[2]))
