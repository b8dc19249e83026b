"""How much memory is in use: a device's by its caching allocator's own counters, a host's by the resident set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch


class DeviceMemory:
    """The caching allocator of a CUDA device. All in bytes."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocated(self) -> int:
        return torch.cuda.memory_allocated(self.device)

    def peak(self) -> int:
        """The most allocated since `reset_peak`."""
        return torch.cuda.max_memory_allocated(self.device)

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)

    def reserved(self) -> int | None:
        """What the allocator owns, in use or not."""
        return torch.cuda.memory_reserved(self.device)

    def allocations(self) -> int | None:
        """How many segments the device was asked for so far."""
        return torch.cuda.memory_stats(self.device).get("segment.all.allocated", 0)

    def free(self) -> tuple[int, int]:
        """What the device has left, and what it has."""
        return torch.cuda.mem_get_info(self.device)

    def release(self) -> None:
        """Give back to the device what is not in use."""
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


class HostMemory:
    """The resident set of this process. Its peak is the largest since the process began."""

    def allocated(self) -> int:
        statm = Path("/proc/self/statm")
        if statm.exists():
            return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return self.peak()

    def peak(self) -> int:
        import resource  # not on Windows

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit

    def reset_peak(self) -> None:
        """The system keeps the peak of the whole process."""

    def reserved(self) -> int | None:
        return None

    def allocations(self) -> int | None:
        return None

    def free(self) -> tuple[int, int]:
        """Zeros where the system does not tell."""
        if "SC_AVPHYS_PAGES" not in getattr(os, "sysconf_names", ()):  # no Linux
            return 0, 0
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page

    def release(self) -> None:
        """The C library gives back what it likes to."""

    def synchronize(self) -> None:
        """Nothing runs on."""


Memory = DeviceMemory | HostMemory


def memory_of(device: torch.device) -> Memory:
    return DeviceMemory(device) if device.type == "cuda" else HostMemory()
