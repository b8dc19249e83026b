"""Copies of tensors on a GPU, on the CPU: a fake executes copies of the device when their event is waited for, and no
earlier. It does not show that a driver pins the buffers, or how fast the copies are."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from seqwarm_kernels.allocator import pinned_buffers, snapshot
from seqwarm_kernels.allocator.snapshot import restore_afterwards

from ..support.defaults import other_defaults

SIZES = (3, 16, 17, 100, 1, 0)  # a buffer holds 16 numbers


class LateCopies(TorchDispatchMode):
    """Queues the copies with `non_blocking`, as a stream does."""

    def __init__(self):
        super().__init__()
        self.queue, self.most = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.copy_.default and (*args, *(kwargs or {}).values())[2:] == (True,):
            self.queue.append((args[0], args[1]))
            self.most = max(self.most, len(self.queue))
            return args[0]
        return func(*args, **(kwargs or {}))

    def record_event(self):
        queued = list(self.queue)
        return SimpleNamespace(synchronize=lambda: self.run(queued))

    def run(self, copies):
        for copy in copies:
            if any(copy is waiting for waiting in self.queue):
                self.queue.pop(0)
                torch.ops.aten.copy_.default(*copy)


@pytest.fixture
def device(monkeypatch):
    """Tensors with numbers are on the device; a buffer holds 16 numbers of 32 bits."""
    with torch.device("cpu"):
        torch.empty(0)  # torch keeps the functions that take a default device, before this one is replaced
    copies, empty = LateCopies(), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: empty(*size, **options))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: copies)
    monkeypatch.setattr(snapshot, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(pinned_buffers, "_BYTES", 64)
    with copies:
        yield copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_element_is_saved_and_restored(device, dtype):
    high = 2 if dtype == torch.bool else 2**40  # more digits than float32 has
    tensors = [torch.randint(high, (size,)).to(dtype) for size in SIZES] + [torch.ones((), dtype=dtype)]
    before = [tensor.clone() for tensor in tensors]
    values = snapshot._Values(tensors)
    assert device.most == 2, "the device never copies while the CPU does"
    assert not device.queue
    for tensor in tensors:
        tensor.copy_(torch.randint(2, tensor.shape))
    device.most = 0
    values.restore()
    assert device.most == 2
    assert not device.queue
    assert all(map(torch.equal, tensors, before))


def test_model_and_optimizer(device):
    model = nn.Linear(5, 7)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        model(torch.ones(1, 5)).sum().backward()
        optimizer.step()

    step()
    tensors = [*model.parameters(), *(state["exp_avg"] for state in optimizer.state.values())]
    before = [tensor.detach().clone() for tensor in tensors]
    with restore_afterwards(model, optimizer):
        step()
        assert not any(map(torch.equal, tensors, before))
    assert all(map(torch.equal, tensors, before))


def test_strided_tensors_are_restored_beside_others(device):
    strided, overlapping = torch.arange(6.0).view(2, 3).t(), torch.ones(1).expand(3)
    values = snapshot._Values([strided, overlapping, torch.ones(2)])
    strided.zero_()
    values.restore()
    assert strided.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_graphs_from_before_stay_valid(device):
    weight = nn.Parameter(torch.ones(2))
    loss = (weight * weight).sum()
    snapshot._Values([weight]).restore()
    loss.backward()
    assert weight.grad.tolist() == [2, 2]


def test_another_default_device(device):
    tensor = torch.arange(40.0)
    with other_defaults():
        values = snapshot._Values([tensor])
        tensor.zero_()
        values.restore()
    assert tensor.equal(torch.arange(40.0))


def test_two_buffers_of_16_mib_are_pinned(monkeypatch):
    sizes = []
    monkeypatch.setattr(torch, "empty", lambda size, pin_memory, **options: sizes.append(size * pin_memory))
    pinned_buffers.PinnedBuffers()
    assert sizes == [16 * 2**20] * 2


def test_a_driver_that_does_not_pin(device, monkeypatch):
    empty = torch.empty

    def refuse(*size, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: operation not supported")
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    weight = nn.Parameter(torch.ones(2))
    gradient = weight.grad = torch.ones(2)
    model = nn.ParameterList([weight])
    context = restore_afterwards(model)
    with pytest.raises(RuntimeError, match="pinned host memory, which the driver does not allocate: CUDA error: oper"):
        context.__enter__()
    assert weight.grad is gradient


@pytest.mark.gpu
def test_on_a_gpu():
    tensors = [torch.randn(size, device="cuda") for size in (3, 2**22 + 1, 2**23)]
    before = [tensor.clone() for tensor in tensors]
    values = snapshot._Values(tensors)
    assert all(buffer.is_pinned() for buffer in values.buffers.buffers)
    for tensor in tensors:
        tensor.zero_()
    values.restore()
    assert all(map(torch.equal, tensors, before))
