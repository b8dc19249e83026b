"""Times calls with the kernels of one tree, when asked: each line of input names a call, each line of output its time.

So two trees take turns on one GPU, each in a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from seqwarm_kernels import alibi_attention

from ...alibi_attention import problems
from ...alibi_attention.cases import call_of
from ...common.timing import Call, Timing, measure_device
from .cases import timed

_LONGEST = 60.0  # seconds that a process may take for one answer, compilation included: wrong barriers hang


class Worker:
    """A process that times the kernels of `tree`.

    Args:
        log: File for what the process prints beside its answers.
        environment: Variables added to this process's own.
    """

    def __init__(self, tree: Path, log: Path, environment: Mapping[str, str]) -> None:
        self._log = log
        with log.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file,
                env={**os.environ, **environment}, text=True,
            )  # fmt: skip

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def time(self, work: str, cases: tuple[str, ...], number: int) -> Timing:
        """Times the call of one problem.

        Raises:
            RuntimeError: The process ended, or did not answer in time.
        """
        request, answers = self._process.stdin, self._process.stdout
        assert request is not None
        assert answers is not None
        end = time.monotonic() + _LONGEST
        try:
            print(json.dumps([work, cases, number]), file=request, flush=True)
            with selectors.DefaultSelector() as selector:
                selector.register(answers, selectors.EVENT_READ)
                line = answers.readline() if selector.select(end - time.monotonic()) else None
        except BrokenPipeError:
            line = ""
        if line is None:
            raise RuntimeError(f"no answer in {_LONGEST:.0f} s")
        if not line:
            raise RuntimeError(f"ended: {self._log.read_text(errors='replace').strip()[-300:]}")
        return Timing(*json.loads(line))


@functools.cache
def _call(work: str, cases: tuple[str, ...], number: int) -> Call:
    tiny = not torch.cuda.is_available()
    device = torch.device("cpu" if tiny else "cuda")
    problem, skip_tolerance = timed(cases, tiny)[number]
    inputs = problems.draw(problem, "a", device)
    attend = functools.partial(alibi_attention, causal=problem.causal, skip_tolerance=skip_tolerance, backend="triton")
    return call_of(work, attend, inputs, torch.randn_like(inputs[0]))


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = sys.stderr
    for line in sys.stdin:
        work, cases, number = json.loads(line)
        print(json.dumps(measure_device(_call(work, tuple(cases), number))), file=answers, flush=True)


if __name__ == "__main__":
    main()
