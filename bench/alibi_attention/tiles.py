"""Times of each kernel with tiles that the table may not have, to choose the table's rows for a chip."""

from __future__ import annotations

import importlib
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from seqwarm_kernels import alibi_attention

from ..common.timing import quartiles
from ..gpu.records import DeviceRecord, Recorder, exit_if_device_is_lost, explain
from . import problems
from .cases import BOTH, call_of
from .problems import Problem

HEAD_DIMS, LENGTHS = (64, 128), (128, 512, 2048, 16384)
#: Rows and warps of a program, rows of the tiles that it loads, and tiles in flight.
CANDIDATES = tuple(itertools.product(((64, 4), (128, 8)), (32, 64, 128), (2, 3)))
KERNELS = ("forward", "backward_query", "backward_key")
_REPEATS = 12

Times = dict[str, list[Callable[[], float]]]  #: by the name of a kernel, for each launch: milliseconds, once it is done


def tiles(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Without skipping. Each candidate serves all three kernels; those that a chip cannot hold are recorded, too."""
    for head_dim in HEAD_DIMS[:1] if tiny else HEAD_DIMS:
        for candidate in CANDIDATES[:1] if tiny else CANDIDATES:
            for length in LENGTHS[:1] if tiny else LENGTHS:
                if recorder.out_of_time():
                    return
                problem = problems.TINY if tiny else problems.of_length(length, head_dim)
                _measure(recorder, problem, candidate, device)


def _measure(recorder: Recorder, problem: Problem, candidate: Any, device: torch.device) -> None:
    (rows, warps), loaded, stages = candidate
    name = f"{rows}x{loaded}, {warps}, {stages}"
    if any(recorder.has("tiles", problem.case(), work, name, "a") for work in (KERNELS[0], BOTH)):
        return
    inputs = problems.draw(problem, "a", device)

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return alibi_attention(*tensors, skip_tolerance=0, backend="triton")

    call = call_of(BOTH, attend, inputs, torch.randn_like(inputs[0]))
    facts, case = problem.facts(), problem.case()
    try:
        with _replaced_tiles(rows, warps, loaded, stages), _timed_launches() as times:
            call()  # compiles
            times.clear()
            for _ in range(_REPEATS):
                call()
            if device.type == "cuda":
                torch.cuda.synchronize()
    except Exception as error:  # the other candidates are still measured
        recorder.add(DeviceRecord("tiles", case, BOTH, name, facts=facts, failure=explain(error)))
        exit_if_device_is_lost()
        return
    for kernel in KERNELS:
        timing = quartiles([milliseconds() for milliseconds in times[f"{kernel}_kernel"]])
        used = f"{loaded}x{rows}, {warps}, {stages}" if kernel == "backward_key" else name
        recorder.add(
            DeviceRecord("tiles", case, kernel, used, "a", timing.median, timing.low, timing.high, facts=facts)
        )


@contextmanager
def _replaced_tiles(rows: int, warps: int, loaded: int, stages: int) -> Iterator[None]:
    """All kernels take these tiles."""
    host: Any = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton")
    table = importlib.import_module("seqwarm_kernels.ops.alibi_attention.triton_configurations")
    of_queries, of_keys = table.Tiles(rows, loaded, warps, stages), table.Tiles(loaded, rows, warps, stages)
    replaced = host.configuration
    host._known.clear()
    host.configuration = lambda *call, **kind: table.Configuration(of_queries, of_queries, of_keys)
    try:
        yield
    finally:
        host.configuration = replaced
        host._known.clear()


@contextmanager
def _timed_launches() -> Iterator[Times]:
    """Milliseconds of every launch within."""
    launches: Any = importlib.import_module("seqwarm_kernels.ops.triton_launch").Launch
    times: Times = defaultdict(list)
    launch = launches.__call__

    def timed(self: Any, *arguments: Any) -> None:
        times[self._kernel.fn.__name__].append(_time_of(lambda: launch(self, *arguments)))

    launches.__call__ = timed
    try:
        yield times
    finally:
        launches.__call__ = launch


def _time_of(call: Callable[[], None]) -> Callable[[], float]:
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        milliseconds = 1e3 * (time.perf_counter() - start)
        return lambda: milliseconds
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    call()
    last.record()
    return lambda: first.elapsed_time(last)
