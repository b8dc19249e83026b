"""The first steps on a GPU, from a compiler to a captured graph: each passes, or fails with a traceback.

`python -m bench.gpu.steps NAME ... --out FILE` runs steps in this process, and records each as it ends.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import itertools
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from seqwarm_kernels import BatchBuffers, alibi_attention, resize_batch
from seqwarm_kernels.cli.info import launcher_problem
from seqwarm_kernels.ops import backends
from seqwarm_kernels.self_check.calls import CALLS, Attention, Call
from seqwarm_kernels.self_check.exact import Exact

from ..common.records import ROOT
from . import records
from .records import DeviceRecord, append, explain

_MOST_OUTPUT = 4000  # characters in a record

Step = Callable[[torch.device], None]


# ---- the machine


def compiler(device: torch.device) -> None:
    problem = launcher_problem()
    assert problem is None, problem


def trivial_kernel(device: torch.device) -> None:
    from .trivial import add_one

    add_one(device)


def kernels(device: torch.device) -> None:
    """Builds the module for this torch where there is none: the caller of a GPU's operator would wait longer."""
    if (problem := backends.kernels.module_problem) is not None:
        print(f"{problem}; building", flush=True)
        subprocess.run([sys.executable, "setup.py", "build_ext", "--inplace"], cwd=ROOT, check=True)


# ---- results


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def compare(operator: str, call: Call, device: torch.device, backend: str | None = None) -> None:
    """Compares a call with the reference in float64."""
    dtype = _dtype(device)
    backend = backends.choose(operator, device.type, backend, dtype)
    found = list(call.compare(backend, device.type, dtype))
    print(operator, backend, dtype, *found, sep="\n", flush=True)
    wrong = [str(comparison) for comparison in found if not comparison.within()]
    assert not wrong, "; ".join(wrong)


def forward(device: torch.device) -> None:
    """The smallest forward with bulk copies."""
    dtype = _dtype(device)
    tensors = [torch.randn(1, 1, 128, 64, device=device).to(dtype) for _ in range(3)]
    out = alibi_attention(*tensors)
    exact = Exact(lambda given: [alibi_attention(*given, backend="reference")], tensors)
    [comparison] = exact.compare(["out"], [out], [dtype])
    assert comparison.within(), str(comparison)


def boundary_length(length: int, device: torch.device) -> None:
    """A length around a tile's end, where keys begin to be skipped, or beyond; and twice for equal bits."""
    compare("alibi_attention", Attention(lengths=(length, length), heads=(2, 1)), device)
    inputs = _inputs(device, length)
    first, second = _results(inputs), _results(inputs)
    assert all(map(torch.equal, first, second)), "the same inputs gave other bits"


def _inputs(device: torch.device, length: int) -> list[Tensor]:
    return [torch.randn(2, 2, length, 64, device=device).to(_dtype(device)).requires_grad_() for _ in range(3)]


def _results(inputs: list[Tensor]) -> list[Tensor]:
    out = alibi_attention(*inputs)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


# ---- streams, graphs, compilers


def another_stream(device: torch.device) -> None:
    inputs = _inputs(device, 600)
    expected = _results(inputs)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # work on the default stream would overtake it
        found = _results(inputs)
        batch = resize_batch({"input_ids": torch.arange(100, device=device).view(2, 50)}, 10)
    stream.synchronize()
    assert all(map(torch.equal, expected, found))
    assert batch["input_ids"].tolist() == torch.arange(100).view(2, 50)[:, :10].tolist()


def captured_graph(device: torch.device) -> None:
    """A captured step, replayed with other data."""
    inputs = _inputs(device, 600)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        _results(inputs)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _results(inputs)
    with torch.no_grad():
        for tensor in inputs:
            tensor.normal_()
    graph.replay()
    assert all(map(torch.equal, found, _results(inputs)))


def compiled(device: torch.device) -> None:
    inputs = _inputs(device, 128)
    out = torch.compile(alibi_attention, fullgraph=True)(*inputs)
    assert torch.equal(out, alibi_attention(*inputs))
    torch.autograd.grad(out.sum(), inputs)


def no_synchronization(device: torch.device) -> None:
    inputs, batch = _inputs(device, 600), {"input_ids": torch.arange(100, device=device).view(2, 50)}
    _results(inputs), resize_batch(batch, 10)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        _results(inputs), resize_batch(batch, 10)
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- sanitizers


def every_kernel(device: torch.device) -> None:
    """Small calls of every operator by each of its backends, and a batch in pinned memory."""
    for operator, backend in itertools.product(CALLS, ("native", "triton")):
        if backends.why_not(operator, backend, device.type, _dtype(device)) is None:
            for call in CALLS[operator].values():
                compare(operator, call, device, backend)
    if device.type == "cuda":
        pinned = {"input_ids": torch.arange(70).view(7, 10).pin_memory()}
        resize_batch(pinned, 4, out=BatchBuffers(pinned, 4, device=device))


def sanitize(tool: str, device: torch.device) -> None:
    """The same under a tool of compute-sanitizer."""
    code = "import torch; from bench.gpu.steps import every_kernel; every_kernel(torch.device('cuda'))"
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    options = ["--tool", tool, "--target-processes", "application-only", "--print-limit", "20", "--error-exitcode", "9"]
    # The tool sees torch's memory pool as one block, and would miss accesses outside of a tensor.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    subprocess.run([program, *options, sys.executable, "-c", code], cwd=ROOT, check=True, env=environment)


#: If one of these fails, nothing else runs.
ESSENTIAL: dict[str, Step] = {"compiler": compiler, "trivial kernel": trivial_kernel, "kernels": kernels}
FIRST: dict[str, Step] = {
    "forward": forward,
    **{
        f"length {length}": functools.partial(boundary_length, length)
        for length in (1, 5, 127, 128, 129, 511, 512, 513, 2049)
    },
    "every kernel": every_kernel,
    "another stream": another_stream,
    "captured graph": captured_graph,
    "torch.compile": compiled,
    "no synchronization": no_synchronization,
}
SANITIZERS: dict[str, Step] = {
    tool: functools.partial(sanitize, tool) for tool in ("memcheck", "racecheck", "initcheck")
}
STEPS = ESSENTIAL | FIRST | SANITIZERS
#: Left out of a dry run.
NEED_A_GPU = {
    *("trivial kernel", "kernels", "another stream", "captured graph", "no synchronization"),
    *("torch.compile", *SANITIZERS),
    *("length 511", "length 512", "length 513", "length 2049"),  # these take long on a CPU
}


def step_record(name: str, seconds: float, failure: str | None, output: str = "") -> DeviceRecord:
    facts = {} if failure is None else {"output": output[-_MOST_OUTPUT:]}
    figures = {"seconds": seconds}
    return DeviceRecord(records.STEPS, name, "step", "seqwarm_kernels", figures=figures, facts=facts, failure=failure)


def run_step(name: str, device: torch.device) -> DeviceRecord:
    start = time.monotonic()
    torch.manual_seed(0)
    try:
        STEPS[name](device)
        if device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:
        traceback.print_exc()
        return step_record(name, time.monotonic() - start, explain(error), traceback.format_exc())
    return step_record(name, time.monotonic() - start, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="+", choices=STEPS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="after these, the traceback is printed")
    parser.add_argument("--dry-run", action="store_true")
    arguments = parser.parse_args()
    faulthandler.enable()
    faulthandler.dump_traceback_later(arguments.seconds, exit=True)
    device = torch.device("cpu" if arguments.dry_run else "cuda")
    for name in arguments.names:
        append(arguments.out, run_step(name, device))


if __name__ == "__main__":
    main()
