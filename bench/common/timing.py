"""How long a call takes: on the device, between events; for the caller, by the clock."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

Call = Callable[[], object]
QUEUED = 20  #: calls launched ahead of the device; more would fill its queue


class Timing(NamedTuple):
    """Milliseconds of one call: the median, the middle half, and what the caller spends on launching it."""

    median: float
    low: float
    high: float
    host: float | None = None


def measure(call: Call, milliseconds: float = 100.0) -> Timing:
    """On a GPU if there is one, for about so long."""
    if not torch.cuda.is_available():
        return host_time(call, 3)
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        call()
    launching = (time.perf_counter() - start) / 3 * 1e3
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / 3 * 1e3
    return _device_time(call, repeats=int(min(100, max(10, milliseconds / whole))), launching=launching)


def _device_time(call: Call, repeats: int, launching: float) -> Timing:
    """Between events. The device sleeps while calls are queued, so that it never waits for the host, and its cache is
    overwritten before each of them."""
    properties = torch.cuda.get_device_properties()
    overwritten = torch.empty(2 * properties.L2_cache_size, dtype=torch.int8, device="cuda")
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    host: list[float] = []
    while len(events) < repeats:
        torch.cuda._sleep(int(min(50.0, 1.5 * QUEUED * (launching + 0.05)) * _cycles_per_millisecond()))
        for _ in range(min(QUEUED, repeats - len(events))):
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            overwritten.zero_()
            pair[0].record()
            start = time.perf_counter()
            call()
            host.append((time.perf_counter() - start) * 1e3)
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
    return quartiles([start.elapsed_time(end) for start, end in events], quartiles(host).median)


@functools.cache
def _cycles_per_millisecond() -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 10_000_000
    for _ in range(2):  # the first one wakes the device
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
    return cycles / start.elapsed_time(end)


def host_time(call: Call, repeats: int) -> Timing:
    """What the caller waits, without waiting for the device."""
    call()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return quartiles(times)


def quartiles(times: list[float], host: float | None = None) -> Timing:
    low, median, high = torch.tensor(times, dtype=torch.float64).quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    return Timing(median.item(), low.item(), high.item(), host)


def extra_bytes(call: Call) -> int | None:
    """The most memory that a call has in use at a time beyond what was in use before; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def peak_extra_bytes(call: Call) -> int | None:
    """As `extra_bytes` on a CPU, by this process's resident memory; None where the system does not tell."""
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return None

    def kilobytes(name: str) -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith(name))
        return int(line.split()[1])

    call()  # what is made once, compiled code for one
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed and not given back would hide what the call asks for
    reset.write_text("5")  # the peak becomes what is resident now
    before = kilobytes("VmRSS")
    result = call()
    peak = kilobytes("VmHWM")
    del result
    return (peak - before) * 1024


def device_allocations() -> int:
    """How often memory was asked of the device so far."""
    return torch.cuda.memory_stats()["num_device_alloc"] if torch.cuda.is_available() else 0


def launches(call: Call) -> int | None:
    """Kernels, copies and fills that one call starts; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or ())
