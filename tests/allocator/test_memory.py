"""warmup_allocator on a fake device that runs out of memory, and on the host."""

import json
import weakref
from collections import UserList
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from bench.common import timing
from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator import memory, rehearsal, warmup
from seqwarm_kernels.allocator.memory import HostMemory

from ..support.same import assert_same
from .traces import everything

MEBIBYTE = 2**20


class FakeDevice:
    """Counters of a caching allocator. A token takes 1 MiB during a pass; the device has 100 MiB."""

    def __init__(self, fragmented=0, total=100 * MEBIBYTE, per_token=MEBIBYTE):
        self.calls = []
        self.total = self.limit = total
        self.per_token = per_token
        self.owned = self.most = 0
        self.fragmented = fragmented
        self.segments = 0

    def take(self, tokens):
        self.most = max(self.most, tokens * self.per_token)
        if self.most > self.limit:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tokens} MiB.\nGPU 0 has ...")
        if self.most > self.owned:
            self.segments += 1
            self.owned = self.most

    def allocated(self):
        return 0

    def peak(self):
        return self.most

    def reset_peak(self):
        self.calls.append("reset_peak")
        self.most = 0

    def reserved(self):
        return self.owned + self.fragmented

    def allocations(self):
        return self.segments

    def free(self):
        return self.total - self.owned, self.total

    @contextmanager
    def limited_to(self, size):
        self.limit = size
        yield
        self.limit = self.total

    def reserve_spare(self):
        self.calls.append("reserve_spare")

    def release(self):
        self.calls.append("release")
        self.owned = 0

    def synchronize(self):
        self.calls.append("synchronize")


class Model(nn.Module):
    """Takes memory of the device in forward."""

    def __init__(self, device):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.device, self.shapes = device, UserList()

    def forward(self, input_ids):
        self.shapes.append(tuple(input_ids.shape))
        self.device.take(input_ids.numel())
        return self.embedding(input_ids)


@pytest.fixture
def on_device(monkeypatch):
    """Returns a model on a device of these options, which the model has as `device`."""

    def make(**options):
        fake = FakeDevice(**options)
        monkeypatch.setattr(warmup, "memory_of", lambda _: fake)
        return Model(fake)

    return make


def ramp(max_len=16):
    return SequenceLengthScheduler(4, max_len, duration=10, step_size=4)


def test_memory_at_each_length_and_no_new_segment_after_the_first(on_device):
    model = on_device()
    report = warmup_allocator(model, 16, batch_size=5, scheduler=ramp())
    assert report.lengths == (16, 4, 8, 12)
    assert [entry.peak_bytes for entry in report.memory] == [length * 5 * MEBIBYTE for length in report.lengths]
    assert [entry.reserved_bytes for entry in report.memory] == [80 * MEBIBYTE] * 4
    assert (report.device_allocations, report.last_allocations) == (1, 0)
    assert report.peak_bytes == report.reserved_bytes == 80 * MEBIBYTE
    assert "release" not in model.device.calls
    assert model.device.calls[-1] == "synchronize"
    assert json.loads(report.to_json())["memory"][1]["length"] == 4
    printed = replace(report, compiled=("a kernel",), seconds=1.25, reserved_bytes=2000 * MEBIBYTE)
    assert str(printed).splitlines() == [
        "warmup_allocator",
        "  device              cpu",
        "  batch size          5",
        "  lengths             16, then 3 from 4 to 12",
        "  peak memory         80 MiB",
        "  reserved memory     2,000 MiB",
        "  device allocations  1",
        "  compiled            1 kernels and graphs",
        "  time                1.25 s",
    ]


@pytest.mark.parametrize(("allocating", "rehearsals", "last"), [(0, 1, 0), (3, 4, 0), (100, 5, 5)])
def test_lengths_are_rehearsed_until_nothing_is_allocated(on_device, allocating, rehearsals, last):
    model = on_device()
    device = model.device
    device.take = lambda tokens: setattr(
        device, "segments", device.segments + (len(model.shapes) <= 1 + 4 * allocating)
    )
    report = warmup_allocator(model, 16, scheduler=ramp())
    assert [length for _, length in model.shapes] == [16, *([4, 8, 12, 16, 16] * rehearsals)]
    assert report.last_allocations == last
    assert device.calls.count("reserve_spare") == 1
    assert report.lengths == (16, 4, 8, 12)


def test_without_a_schedule_nothing_is_rehearsed(on_device):
    model = on_device()
    report = warmup_allocator(model, 16)
    assert report.last_allocations is None
    assert "  lengths             16\n" in str(report)
    assert "reserve_spare" not in model.device.calls


def test_out_of_memory_is_reported(on_device):
    model = on_device()
    before = everything(model)
    report = warmup_allocator(model, 20, batch_size=6)
    assert_same(before, everything(model))
    problem = report.out_of_memory
    assert (problem.batch_size, problem.length, problem.total_bytes) == (6, 20, 100 * MEBIBYTE)
    assert problem.message == "CUDA out of memory. Tried to allocate 120 MiB."
    assert problem.largest_batch_size is None
    assert problem.advice is None
    assert report.lengths == ()
    assert model.device.owned == 0, "the memory of the failed pass was not released"
    words = "batch size 6 at length 20 does not fit: 0 MiB were in use before, 100 MiB of 100 MiB were free"
    assert words in str(report)
    assert "find_batch_size=True" in str(report)
    assert "  lengths             none\n" in str(report)
    assert str(replace(problem, advice="an advice")) == f"{problem}; an advice"
    with pytest.raises(torch.OutOfMemoryError, match="batch size 6 at length 20"):
        warmup_allocator(model, 20, batch_size=6, raise_out_of_memory=True)


#: 100 tokens fit: "auto" leaves 3 % of a large device free, and 1 GiB of a small one.
LARGE = {"total": 104 * 2**30, "per_token": 2**30}
SMALL = {"total": 2**30 + 100 * MEBIBYTE}


@pytest.mark.parametrize(("max_len", "largest"), [(17, 5), (101, 0)])
def test_the_largest_batch_size_is_found(on_device, max_len, largest):
    report = warmup_allocator(on_device(), max_len, batch_size=33, find_batch_size=True)
    assert (report.out_of_memory.batch_size, report.out_of_memory.largest_batch_size) == (33, largest)
    assert report.lengths == ()
    words = "not even a single row fits" if largest == 0 else f"the largest batch size that fits is {largest}"
    assert words in str(report)


@pytest.mark.parametrize(("max_len", "largest", "size"), [(20, 5, LARGE), (100, 1, SMALL), (101, 0, SMALL)])
def test_auto_takes_the_largest(on_device, size, max_len, largest):
    """It trains again with the rows that it has found: the last attempt did not fit, and released its memory."""
    model = on_device(**size)
    device = model.device
    report = warmup_allocator(model, max_len, batch_size="auto", scheduler=ramp(max_len))
    assert report.batch_size == largest
    assert report.lengths[:2] == ((max_len, 4) if largest else ())
    if largest == 0:
        assert report.out_of_memory.largest_batch_size == 0
    else:
        assert report.out_of_memory is None
    assert device.limit == device.total
    assert device.owned == largest * max_len * device.per_token, "the memory of the chosen batch size is not reserved"
    assert len(model.shapes) < 30


def test_what_did_fit_in_the_search_may_not_fit_again(on_device):
    model = on_device(**SMALL)
    fitting = iter([True, True, True, False, False, False, False])  # 1, 2, 4, 8, 6, 5 rows, and 4 again
    model.device.take = lambda tokens: None if next(fitting) else FakeDevice.take(model.device, 1000)
    report = warmup_allocator(model, 25, batch_size="auto")
    assert (report.batch_size, report.lengths) == (4, ())
    assert (report.out_of_memory.batch_size, report.out_of_memory.length) == (4, 25)


def test_auto_ends_where_everything_fits(on_device, monkeypatch):
    monkeypatch.setattr(rehearsal, "_MOST_ROWS", 8)
    model = on_device()
    model.device.take = lambda tokens: None
    report = warmup_allocator(model, 25, batch_size="auto")
    assert (report.batch_size, report.lengths, report.out_of_memory) == (8, (25,), None)


def test_a_shorter_length_that_does_not_fit(on_device):
    """After mode="reshape" with padding a batch holds more tokens than before."""
    scheduler = SequenceLengthScheduler(11, 20, duration=10, step_size=9)
    options = {"mode": "reshape", "remainder": "pad"}
    report = warmup_allocator(on_device(), 20, batch_size=5, scheduler=scheduler, resize_options=options)
    assert report.lengths == (20,)
    assert (report.out_of_memory.batch_size, report.out_of_memory.length) == (5, 11)


def test_memory_is_released_when_nothing_refers_to_what_the_pass_has_made(on_device):
    model, outputs, found = on_device(), [], []
    optimizer = torch.optim.AdamW(model.parameters())

    def released():
        found.append(([output() for output in outputs], model.embedding.weight.grad, len(optimizer.state)))

    def fail(*_):
        if optimizer.state:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    optimizer.register_step_pre_hook(fail)
    model.device.release = released
    assert warmup_allocator(model, 20, optimizer=optimizer).out_of_memory.length == 20
    assert found == [([None, None], None, 0)]


@pytest.mark.parametrize(
    ("settings", "unused", "is_advised"),
    [(None, 10, True), (None, 9.9, False), ("a:1,expandable_segments:True", 10, False)],
)
def test_advice_for_fragmented_memory_from_a_tenth_on(on_device, monkeypatch, settings, unused, is_advised):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings or "")
    model = on_device(fragmented=(40 + unused) * MEBIBYTE)
    model.device.allocated = lambda: 40 * MEBIBYTE
    advice = warmup_allocator(model, 101).out_of_memory.advice
    assert (advice is not None) == is_advised
    assert advice is None or "10 MiB are reserved by the allocator but fragmented" in advice


def test_out_of_memory_is_recognized(on_device):
    messages = [
        "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ]
    assert all(memory.is_out_of_memory(RuntimeError(message)) for message in messages)
    assert memory.is_out_of_memory(MemoryError())
    assert not memory.is_out_of_memory(ValueError(messages[0]))
    model = on_device()
    model.device.take = Mock(side_effect=RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"))
    with pytest.raises(RuntimeError, match="CUBLAS_STATUS_NOT_INITIALIZED"):
        warmup_allocator(model, 8)


def test_ranks_of_fully_shard_have_the_same_room(monkeypatch):
    """The smallest room of all ranks beyond what each has allocated. Unused memory in pieces is released first."""
    device, asked = FakeDevice(fragmented=30), []
    device.allocated = lambda: 7
    consensus = SimpleNamespace(smallest=lambda room: asked.append(room) or room - 10)
    with warmup._limited(device, consensus, are_waiting=True, auto=False):
        assert device.limit == device.total + 30 - 10
    assert asked == [device.total + 30 - 7]
    assert device.calls == ["release"]
    for auto in (False, True):
        with warmup._limited(device, None, are_waiting=False, auto=auto):
            assert (device.limit == device.total) == (not auto)
    with warmup._limited(HostMemory(), None, are_waiting=True, auto=False):
        pass


def test_a_limit_of_the_allocator_is_lifted_at_the_end(monkeypatch):
    fractions = [1.0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 200))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fractions[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fractions.append(share))
    device = memory.DeviceMemory(torch.device("cuda"))
    with pytest.raises(KeyError), device.limited_to(50):
        raise KeyError
    with device.limited_to(100), device.limited_to(400):
        pass
    assert fractions == [1.0, 0.25, 1.0, 0.5, 0.5, 0.5, 1.0]


def test_a_spare_segment_comes_after_the_free_blocks(monkeypatch):
    sizes = []
    monkeypatch.setattr(torch, "empty", lambda size, **_: sizes.append(size))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * MEBIBYTE)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: {"num_device_alloc": max(len(sizes) - 3, 0)})
    device = memory.DeviceMemory(torch.device("cuda"))
    device.reserve_spare()
    assert sizes == [MEBIBYTE] * 4
    assert device.reserved() == 3 * MEBIBYTE


def test_a_segment_that_grows_counts_as_an_allocation(monkeypatch):
    """Under expandable segments, segments are hardly ever allocated: they grow."""
    counters = {"num_device_alloc": 7, "segment.all.allocated": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: counters)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert memory.DeviceMemory(torch.device("cuda")).allocations() == timing.device_allocations() == 7


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_units_of_the_peak(monkeypatch, platform, unit):
    """macOS counts bytes."""
    resource = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setitem(memory.sys.modules, "resource", resource)
    assert HostMemory().peak() == 7 * unit


def test_available_memory_of_the_host(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24631916 kB\nMemFree: 1024 kB\nMemAvailable:  2048 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    assert HostMemory().free() == (2048 * 1024, 24631916 * 1024)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    assert HostMemory().free() == (0, 0)


def test_on_the_host_the_resident_set_is_reported():
    report = warmup_allocator(nn.Embedding(3, 3), 8)
    assert (report.reserved_bytes, report.device_allocations) == (None, None)
    assert report.peak_bytes > 10 * MEBIBYTE
    assert "of the whole process" in str(report)
    host = HostMemory()
    assert 10 * MEBIBYTE < host.allocated() < 1.1 * host.peak()
    free, total = host.free()
    assert 0 < free <= total
