"""Memory in use: on a CUDA device from the counters of its caching allocator, on the host from the resident set."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

_MEBIBYTE = 2**20
_MEMINFO = Path("/proc/meminfo")
#: In errors of torch's CPU allocator, the CUDA runtime, Triton's launcher, libraries and NCCL.
_OUT_OF_MEMORY = (
    "can't allocate memory",
    "CUDA error: out of memory",
    "Triton Error [CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Cuda failure 2 'out of memory'",
)


class DeviceMemory:
    """The caching allocator of a CUDA device. All sizes are in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """Return the largest allocated size since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def reserved(self) -> int | None:
        """Return the memory that the allocator owns, used or unused."""
        return torch.cuda.memory_reserved(self.device)

    def allocations(self) -> int | None:
        """Return how often the allocator has asked the device for memory, also to let a segment grow."""
        return torch.cuda.memory_stats(self.device)["num_device_alloc"]

    def free(self) -> tuple[int, int]:
        """Return the free memory and the total memory of the device."""
        return torch.cuda.mem_get_info(self.device)

    @contextmanager
    def limited_to(self, size: int) -> Iterator[None]:
        """Let the allocator be out of memory in the block as soon as it would reserve more than `size` bytes."""
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        fraction = max(0, size) / self.free()[1]
        torch.cuda.set_per_process_memory_fraction(min(before, fraction), self.device)
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(before, self.device)

    def reserve_spare(self) -> None:
        """Reserve another segment for tensors of at most 1 MiB."""
        before, tensors = self.allocations(), []
        for _ in range(torch.cuda.memory_reserved(self.device) // _MEBIBYTE + 1):  # the free blocks are taken first
            tensors.append(torch.empty(_MEBIBYTE, dtype=torch.uint8, device=self.device))
            if self.allocations() != before:
                return

    def release(self) -> None:
        """Return unused memory to the device."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class HostMemory:
    """The resident set of this process. Its peak is the largest since the process started. All sizes are in bytes."""

    def allocated(self) -> int:
        statm = Path("/proc/self/statm")
        if statm.exists():
            return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return self.peak()

    def peak(self) -> int:
        import resource  # not available on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak(self) -> None:
        """No-op: the system keeps the peak of the whole process."""

    def reserved(self) -> int | None:
        return None

    def allocations(self) -> int | None:
        return None

    def free(self) -> tuple[int, int]:
        """Return the memory that is available and the total memory, or zeros if the system does not report them."""
        if not _MEMINFO.exists():  # not Linux
            return 0, 0
        entries = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
        available, total = (int(entries[name].removesuffix("kB")) * 1024 for name in ("MemAvailable", "MemTotal"))
        return available, total

    def limited_to(self, size: int) -> AbstractContextManager[None]:
        """No-op: torch does not limit host memory."""
        return nullcontext()

    def reserve_spare(self) -> None:
        """No-op: malloc does not keep tensors of this size apart."""

    def release(self) -> None:
        """No-op: malloc decides when it returns memory to the system."""

    def synchronize(self) -> None:
        """No-op: the CPU is synchronous."""


Memory = DeviceMemory | HostMemory


def memory_of(device: torch.device) -> Memory:
    return DeviceMemory(device) if device.type == "cuda" else HostMemory()


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and any(message in str(error) for message in _OUT_OF_MEMORY)
    )


def fragmentation_advice(memory: Memory) -> str | None:
    """Return advice if at least a tenth of the device's memory is reserved by the allocator but unused, else None."""
    reserved = memory.reserved()
    if reserved is None:
        return None
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    unused, total = reserved - memory.allocated(), memory.free()[1]
    if "expandable_segments:True" in settings or unused < total / 10:
        return None
    return (
        f"{unused / 2**20:,.0f} MiB are reserved by the allocator but fragmented: set "
        "PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
