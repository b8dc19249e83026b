"""Time and memory of a call, on the CPU and on a GPU."""

from __future__ import annotations

import ctypes
import functools
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch.utils.benchmark import Timer
from tqdm import tqdm

Call = Callable[[], object]
Result = TypeVar("Result")
QUEUED = 20  #: calls launched ahead of the device; more would fill its queue
ROUNDS = 5  #: of calls that take turns
DEVICE_MILLISECONDS = 100.0  #: of measuring on the device


class Timing(NamedTuple):
    """Milliseconds of one call: the median, both quartiles, and the time that the caller spends on the launch."""

    median: float
    low: float
    high: float
    host: float | None = None

    @property
    def iqr(self) -> float:
        return self.high - self.low


def measure_in_turns(calls: Mapping[str, Call], threads: int, seconds: float) -> dict[str, Timing]:
    """Times calls that take turns, each for `seconds` together: all have the machine in the same states."""
    timers = {name: Timer("call()", globals={"call": call}, num_threads=threads) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, timer in timers.items():
            times[name] += [1e3 * each for each in timer.blocked_autorange(min_run_time=seconds / ROUNDS).times]
    return {name: quartiles(found) for name, found in times.items()}


def repeat_in_turns(runs: Mapping[str, Callable[[], Result]], repeats: int, desc: str) -> dict[str, list[Result]]:
    """What the runs return, which take turns: all have the machine in the same states."""
    found: dict[str, list[Result]] = {name: [] for name in runs}
    for _ in tqdm(range(repeats), desc=desc, disable=None):
        for name, run in runs.items():
            found[name].append(run())
    return found


def measure_device(call: Call) -> Timing:
    """Times calls on the GPU for about `DEVICE_MILLISECONDS`. Without a GPU, times three calls on the CPU."""
    if not torch.cuda.is_available():
        return measure_host(call, 3)
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(3):
        call()
    launching = (time.perf_counter() - start) / 3 * 1e3
    torch.cuda.synchronize()
    whole = (time.perf_counter() - start) / 3 * 1e3
    return _device_timing(call, repeats=int(min(100, max(10, DEVICE_MILLISECONDS / whole))), launching=launching)


def _device_timing(call: Call, repeats: int, launching: float) -> Timing:
    """Times calls between CUDA events.

    The device sleeps while calls are queued, so that it never waits for the host. The L2 cache is overwritten before
    each call.
    """
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


def measure_host(call: Call, repeats: int) -> Timing:
    """Times how long the caller waits. Work that the call queues on the device is not awaited."""
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


def extra_device_bytes(call: Call) -> int | None:
    """Peak GPU memory of a call beyond the memory in use before it. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def extra_resident_bytes(call: Call) -> int | None:
    """Peak resident memory of a call beyond the memory in use before it. None on systems without this counter."""
    reset = Path("/proc/self/clear_refs")
    if not reset.exists():
        return None
    call()  # allocates what is kept between calls, compiled code for example
    ctypes.CDLL(None).malloc_trim(0)  # memory that was freed but not returned to the system would hide allocations
    reset.write_text("5")  # resets the peak to the current resident memory
    before = memory_bytes("VmRSS")
    result = call()
    peak = memory_bytes("VmHWM")
    del result
    return peak - before


def memory_bytes(name: str) -> int:
    """An entry of /proc/self/status: VmHWM is the highest resident memory so far, RssAnon what maps no file."""
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def device_allocations() -> int:
    """Number of allocations that PyTorch has requested from the device so far."""
    return torch.cuda.memory_stats()["num_device_alloc"] if torch.cuda.is_available() else 0


def launches(call: Call) -> int | None:
    """Number of kernels, copies and fills that one call starts. None without a GPU."""
    if not torch.cuda.is_available():
        return None
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events() or ())
