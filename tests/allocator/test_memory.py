"""warmup_allocator on a fake device that runs out of memory, and on the host."""

import json
import weakref
from collections import UserList
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from bench.common import timing
from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator import memory, rehearsal, warmup
from seqwarm_kernels.allocator.memory import HostMemory
from seqwarm_kernels.allocator.report import AllocatorReport
from tests.allocator.traces import assert_same, everything

from ..support.tiers import first_fast

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
    """Allocates memory of the fake device in forward."""

    def __init__(self, device):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.device, self.shapes = device, UserList()

    def forward(self, input_ids):
        self.shapes.append(tuple(input_ids.shape))
        self.device.take(input_ids.numel())
        return self.embedding(input_ids)


@pytest.fixture
def device(monkeypatch):
    fake = FakeDevice()
    monkeypatch.setattr(warmup, "memory_of", lambda _: fake)
    return fake


def test_memory_at_each_length_and_no_new_segment_after_the_first(device):
    scheduler = SequenceLengthScheduler(4, 16, duration=10, step_size=4)
    report = warmup_allocator(Model(device), 16, batch_size=5, scheduler=scheduler)
    assert report.lengths == (16, 4, 8, 12)
    assert [entry.peak_bytes for entry in report.memory] == [length * 5 * MEBIBYTE for length in report.lengths]
    assert [entry.reserved_bytes for entry in report.memory] == [80 * MEBIBYTE] * 4
    assert report.device_allocations == 1
    assert report.peak_bytes == report.reserved_bytes == 80 * MEBIBYTE
    assert "release" not in device.calls
    assert device.calls[-1] == "synchronize"
    assert report.last_allocations == 0
    assert "80 MiB" in str(report)
    assert json.loads(report.to_json())["memory"][1]["length"] == 4


@pytest.mark.parametrize(("allocating", "rehearsals", "last"), [(0, 1, 0), (1, 2, 0), (3, 4, 0), (100, 5, 4)])
def test_lengths_are_rehearsed_until_nothing_is_allocated(device, allocating, rehearsals, last):
    model = Model(device)
    device.take = lambda tokens: setattr(
        device, "segments", device.segments + (len(model.shapes) <= 1 + 4 * allocating)
    )
    report = warmup_allocator(model, 16, scheduler=SequenceLengthScheduler(4, 16, duration=10, step_size=4))
    assert [length for _, length in model.shapes] == [16, *([4, 8, 12, 16] * rehearsals)]
    assert report.last_allocations == last
    assert device.calls.count("reserve_spare") == 1
    assert report.lengths == (16, 4, 8, 12)


@pytest.mark.parametrize(
    ("lengths", "words"), [((), "none"), ((16,), "16"), ((16, 4, 8, 12), "16, then 3 from 4 to 12")]
)
def test_the_printed_report_of_a_device(lengths, words):
    report = AllocatorReport(
        device="cuda:0",
        batch_size=2,
        lengths=lengths,
        seconds=1.25,
        peak_bytes=80 * MEBIBYTE,
        reserved_bytes=2000 * MEBIBYTE,
        device_allocations=3,
        last_allocations=0,
        compiled=("a kernel",),
        memory=(),
        out_of_memory=None,
    )
    assert str(report).splitlines() == [
        "warmup_allocator",
        "  device              cuda:0",
        "  batch size          2",
        f"  lengths             {words}",
        "  peak memory         80 MiB",
        "  reserved memory     2,000 MiB",
        "  device allocations  3",
        "  compiled            1 kernels and graphs",
        "  time                1.25 s",
    ]


def test_without_a_schedule_nothing_is_rehearsed(device):
    report = warmup_allocator(Model(device), 16)
    assert report.last_allocations is None
    assert "reserve_spare" not in device.calls


def test_out_of_memory_is_reported(device):
    model = Model(device)
    before = everything(model)
    report = warmup_allocator(model, 20, batch_size=6)
    assert_same(before, everything(model))
    problem = report.out_of_memory
    assert (problem.batch_size, problem.length, problem.total_bytes) == (6, 20, 100 * MEBIBYTE)
    assert problem.message == "CUDA out of memory. Tried to allocate 120 MiB."
    assert problem.largest_batch_size is None
    assert problem.advice is None
    assert report.lengths == ()
    assert device.owned == 0, "the memory of the failed pass was not released"
    assert "batch size 6 at length 20 does not fit: 0 MiB were in use before, 100 MiB of 100 MiB were free" in str(
        report
    )
    assert "find_batch_size=True finds the largest that fits" in str(report)
    assert str(replace(problem, advice="an advice")) == f"{problem}; an advice"


def test_out_of_memory_is_raised_where_asked(device):
    with pytest.raises(torch.OutOfMemoryError, match="warmup_allocator: batch size 6 at length 20 does not fit"):
        warmup_allocator(Model(device), 20, batch_size=6, raise_out_of_memory=True)
    assert device.owned == 0


@pytest.mark.parametrize(("max_len", "largest"), first_fast([(20, 5), (7, 14), (100, 1), (101, 0)]))
def test_the_largest_batch_size_is_found(device, max_len, largest):
    report = warmup_allocator(Model(device), max_len, batch_size=33, find_batch_size=True)
    assert report.out_of_memory.largest_batch_size == largest
    assert report.out_of_memory.batch_size == 33
    assert report.lengths == ()
    words = "not even a single row fits" if largest == 0 else f"the largest batch size that fits is {largest}"
    assert words in str(report)


#: Both leave 100 tokens: of a large device 3 % stay free, and 1 GiB of a small one.
LARGE = {"total": 104 * 2**30, "per_token": 2**30}
SMALL = {"total": 2**30 + 100 * MEBIBYTE}


@pytest.mark.parametrize("size", [LARGE, SMALL])
@pytest.mark.parametrize(("max_len", "largest"), [(20, 5), (17, 5), (7, 14), (100, 1)])
def test_auto_takes_the_largest(monkeypatch, size, max_len, largest):
    device = FakeDevice(**size)
    monkeypatch.setattr(warmup, "memory_of", lambda _: device)
    model = Model(device)
    scheduler = SequenceLengthScheduler(4, max_len, duration=10, step_size=4)
    report = warmup_allocator(model, max_len, batch_size="auto", scheduler=scheduler)
    assert report.batch_size == largest
    assert report.lengths[0] == max_len
    assert report.lengths[1] == 4
    assert report.out_of_memory is None
    assert device.limit == device.total
    assert device.owned == largest * max_len * device.per_token, "the memory of the chosen batch size is not reserved"
    assert len(model.shapes) < 30


def test_auto_trains_again_with_the_rows_that_it_has_found(monkeypatch):
    """The last attempt of the search did not fit, and released its memory."""
    device = FakeDevice(**SMALL)
    monkeypatch.setattr(warmup, "memory_of", lambda _: device)
    report = warmup_allocator(Model(device), 25, batch_size="auto")
    assert report.batch_size == 4
    assert device.owned == 100 * device.per_token


def test_what_did_fit_in_the_search_may_not_fit_again(monkeypatch):
    device = FakeDevice(**SMALL)
    monkeypatch.setattr(warmup, "memory_of", lambda _: device)
    fitting = iter([True, True, True, False, False, False, False])  # 1, 2, 4, 8, 6, 5 rows, and 4 again
    monkeypatch.setattr(device, "take", lambda tokens: None if next(fitting) else FakeDevice.take(device, 1000))
    report = warmup_allocator(Model(device), 25, batch_size="auto")
    assert (report.batch_size, report.lengths) == (4, ())
    assert (report.out_of_memory.batch_size, report.out_of_memory.length) == (4, 25)


def test_auto_ends_where_everything_fits(device, monkeypatch):
    monkeypatch.setattr(rehearsal, "_MOST_ROWS", 8)
    monkeypatch.setattr(device, "take", lambda tokens: None)
    report = warmup_allocator(Model(device), 25, batch_size="auto")
    assert (report.batch_size, report.lengths, report.out_of_memory) == (8, (25,), None)


def test_memory_is_released_when_nothing_refers_to_what_the_pass_has_made(device, monkeypatch):
    model, outputs, found = Model(device), [], []
    optimizer = torch.optim.AdamW(model.parameters())

    def released():
        found.append(([output() for output in outputs], model.embedding.weight.grad, len(optimizer.state)))

    def fail(*_):
        if optimizer.state:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    optimizer.register_step_pre_hook(fail)
    monkeypatch.setattr(device, "release", released)
    assert warmup_allocator(model, 20, optimizer=optimizer).out_of_memory.length == 20
    assert found == [([None, None], None, 0)]


def test_auto_when_nothing_fits(device):
    """The device is smaller than what stays free."""
    report = warmup_allocator(Model(device), 101, batch_size="auto")
    assert report.batch_size == 0
    assert report.lengths == ()
    assert report.out_of_memory.largest_batch_size == 0


def test_a_shorter_length_that_does_not_fit(device):
    """After mode="reshape" with padding a batch holds more tokens than before."""
    scheduler = SequenceLengthScheduler(11, 20, duration=10, step_size=9)
    options = {"mode": "reshape", "remainder": "pad"}
    report = warmup_allocator(Model(device), 20, batch_size=5, scheduler=scheduler, resize_options=options)
    assert report.lengths == (20,)
    assert (report.out_of_memory.batch_size, report.out_of_memory.length) == (5, 11)


@pytest.mark.parametrize("settings", [None, "expandable_segments:True", "a:1,expandable_segments:True"])
def test_advice_for_fragmented_memory(monkeypatch, settings):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    if settings is not None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", settings)
    fake = FakeDevice(fragmented=30 * MEBIBYTE)
    monkeypatch.setattr(warmup, "memory_of", lambda _: fake)
    advice = warmup_allocator(Model(fake), 101).out_of_memory.advice
    assert (advice is None) == (settings is not None)
    assert advice is None or "30 MiB are reserved by the allocator but fragmented" in advice


@pytest.mark.parametrize(("unused", "is_advised"), [(10, True), (9.9, False)])
def test_advice_from_a_tenth_of_the_device_on(monkeypatch, unused, is_advised):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)
    fake = FakeDevice(fragmented=(40 + unused) * MEBIBYTE)
    fake.allocated = lambda: 40 * MEBIBYTE
    advice = memory.fragmentation_advice(fake)
    assert (advice is not None) == is_advised
    assert advice is None or advice.startswith("10 MiB are reserved")


@pytest.mark.parametrize(
    "message",
    [
        "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    ],
)
def test_out_of_memory_is_recognized(message):
    def fails(self, input_ids):
        raise RuntimeError(message)

    model = Model(FakeDevice())
    model.forward = fails.__get__(model)
    assert warmup_allocator(model, 8).out_of_memory.message == message.partition("\n")[0]


def test_available_memory_of_the_host(monkeypatch, tmp_path):
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       24631916 kB\nMemFree: 1024 kB\nMemAvailable:  2048 kB\nHugePages_Total: 0\n")
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    assert HostMemory().free() == (2048 * 1024, 24631916 * 1024)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "missing")
    assert HostMemory().free() == (0, 0)


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


@pytest.mark.parametrize(("platform", "unit"), [("linux", 1024), ("darwin", 1)])
def test_units_of_the_peak(monkeypatch, platform, unit):
    """macOS counts bytes."""
    resource = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda _: SimpleNamespace(ru_maxrss=7))
    monkeypatch.setattr(memory.sys, "platform", platform)
    monkeypatch.setitem(memory.sys.modules, "resource", resource)
    assert HostMemory().peak() == 7 * unit


def test_a_segment_that_grows_counts_as_an_allocation(monkeypatch):
    """Under expandable segments, segments are hardly ever allocated: they grow."""
    counters = {"num_device_alloc": 7, "segment.all.allocated": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device=None: counters)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert memory.DeviceMemory(torch.device("cuda")).allocations() == 7
    assert timing.device_allocations() == 7


def test_ranks_of_fully_shard_have_the_same_room(monkeypatch):
    """The smallest room of all ranks beyond what each has allocated. Unused memory in pieces is released first."""
    device = FakeDevice(fragmented=30)
    monkeypatch.setattr(device, "allocated", lambda: 7)
    asked = []
    consensus = SimpleNamespace(smallest=lambda room: asked.append(room) or room - 10)
    with warmup._limited(device, consensus, are_waiting=True, auto=False):
        assert device.limit == device.total + 30 - 10
    assert asked == [device.total + 30 - 7]
    assert device.calls == ["release"]
    for options in ({"are_waiting": False, "auto": False}, {"are_waiting": False, "auto": True}):
        with warmup._limited(device, None, **options):
            assert (device.limit == device.total) == (not options["auto"])
    with warmup._limited(HostMemory(), None, are_waiting=True, auto=False):
        pass


def test_other_errors_are_not_taken_for_out_of_memory(device):
    model = Model(device)
    model.forward = lambda input_ids: (_ for _ in ()).throw(RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"))
    with pytest.raises(RuntimeError, match="CUBLAS"):
        warmup_allocator(model, 8)


def test_on_the_host_the_resident_set_is_reported():
    report = warmup_allocator(nn.Embedding(3, 3), 8)
    assert report.reserved_bytes is None
    assert report.device_allocations is None
    assert report.peak_bytes > 10 * MEBIBYTE
    host = HostMemory()
    assert 10 * MEBIBYTE < host.allocated() < 1.1 * host.peak()
    free, total = host.free()
    assert 0 < free <= total
