"""On a GPU: the speed of a plain copy, and resize_batch beside the same written by hand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from seqwarm_kernels import BatchBuffers, resize_batch
from seqwarm_kernels.ops.backends import choose

from ..common.timing import Call, launches, measure_host
from ..gpu.records import Recorder
from .implementations import Resizing, implementations, problems

#: tensors, rows, tokens and length of a batch with 0.8 GB to read and write
LARGE = (3, 8192, 4096, 2048)


def copy(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """A plain copy: the upper limit of every operation that is bound by memory."""
    source = torch.randn(2**12 if tiny else 2**28, device=device)
    target = torch.empty_like(source)
    megabytes = 2 * source.numel() * source.element_size() / 1e6
    figures = {"moved_megabytes": megabytes}
    recorder.measure("copy", f"{megabytes:.0f} MB", "copy", "torch", lambda: (lambda: target.copy_(source), figures))


def resize(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Every method beside its peers, and batches in pinned host memory."""
    sizes = [(3, 8, 128, 64)] if tiny else [(3, 8, 128, 64), (16, 8, 128, 64), (3, 512, 2048, 1024), LARGE]
    backend = choose("resize_batch", device.type, None)
    for problem in problems(sizes):
        batch = problem.batch(device)
        compiled = problem.tensors == 3 and problem.method in ("truncate", "reshape, padded") and not tiny
        makers = implementations(problem, batch, compiled=compiled, backend=backend)
        for name, make in makers.items():
            _measure(recorder, problem, name, make, 5 if tiny else 200)
    for size in sizes[-2:]:
        problem = Resizing(*size, "truncate")
        for name, make in _from_host(problem, device).items():
            _measure(recorder, problem, name, make, 5 if tiny else 50)


def _measure(recorder: Recorder, problem: Resizing, name: str, make: Callable[[], Call], repeats: int) -> None:
    """Measures time on the device, number of launches, and time that the caller waits."""

    def prepare() -> tuple[Call, dict[str, float]]:
        call, figures = make(), {"moved_megabytes": problem.moved_megabytes()}
        if (count := launches(call)) is not None:
            figures["launches"] = count
        if not torch.cuda.is_available():
            return call, figures
        waited = measure_host(call, repeats)
        torch.cuda.synchronize()
        return call, {**figures, "wait_ms": waited.median}

    recorder.measure("resize_batch", problem.case(), "resize", name, prepare, facts=problem.facts())


def _from_host(problem: Resizing, device: torch.device) -> dict[str, Callable[[], Call]]:
    """Truncates a batch in pinned host memory: reads it there, or copies it to the device first."""
    batch = problem.batch()
    if device.type == "cuda":
        batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    length = problem.length

    def read_from_host() -> Call:
        buffers = BatchBuffers(batch, length, device=device)
        return lambda: resize_batch(batch, length, out=buffers)

    def copied(tensor: Tensor) -> Tensor:
        return tensor.to(device, non_blocking=True)

    def cut_on_the_host() -> object:
        return {name: copied(tensor[:, :length].contiguous()) for name, tensor in batch.items()}

    def copied_whole() -> object:
        return resize_batch({name: copied(tensor) for name, tensor in batch.items()}, length)

    return {
        "from pinned memory, read there": read_from_host,
        "from pinned memory, copied whole, resize_batch": lambda: copied_whole,
        "from pinned memory, cut on the host, copied": lambda: cut_on_the_host,
    }
