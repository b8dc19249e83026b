"""restore_afterwards: each thing that a block may change is as before, and the same object."""

import abc
import collections
import copy
import random
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from seqwarm_kernels import warmup_allocator
from seqwarm_kernels.allocator import snapshot
from seqwarm_kernels.allocator.snapshot import restore_afterwards

from ..support.defaults import other_defaults


def model_and_optimizer():
    """With gradients and state. The optimizer has a parameter of its own, and no state for the last one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    own = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": [own, model[2].weight], "lr": 0.5}])
    (model[:2](torch.randn(4, 3)).square().sum() + own.sum()).backward()
    optimizer.step()
    return model, optimizer, own


def leave(model, optimizer, scaler=None):
    with restore_afterwards(model, optimizer, scaler):
        pass


def test_gradients_are_none_inside_and_the_same_tensors_afterwards():
    model, optimizer, own = model_and_optimizer()
    tensors = [*model.parameters(), own]
    gradients = [tensor.grad for tensor in tensors]
    copies = [None if gradient is None else gradient.clone() for gradient in gradients]
    with restore_afterwards(model, optimizer):
        assert all(tensor.grad is None for tensor in tensors)
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
    for tensor, gradient, copied in zip(tensors, gradients, copies, strict=True):
        assert tensor.grad is gradient
        assert gradient is None or gradient.equal(copied)
    assert own.grad is not None


def test_values_are_restored_after_an_error():
    model, optimizer, own = model_and_optimizer()
    tensors = [*model.parameters(), *model.buffers(), own]
    copies = [tensor.detach().clone() for tensor in tensors]
    with pytest.raises(RuntimeError, match="inside"), restore_afterwards(model, optimizer):  # noqa: PT012
        for tensor in tensors:
            tensor.data.add_(1)
        raise RuntimeError("inside")
    assert all(tensor.equal(copied) for tensor, copied in zip(tensors, copies, strict=True))


def test_values_of_an_optimizer_inside_are_restored():
    """As in ZeroRedundancyOptimizer, whose state is that of its attribute `optim`."""
    model = nn.Linear(3, 2)
    outer = torch.optim.SGD(model.parameters(), lr=0.1)
    outer.optim = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    outer.optim.step()
    with restore_afterwards(model, outer):
        model(torch.ones(1, 3)).sum().backward()
        outer.optim.step()
        outer.optim.param_groups[0]["lr"] = 0.5
    assert outer.optim.param_groups[0]["lr"] == 0.1
    assert [int(state["step"]) for state in outer.optim.state.values()] == [1, 1]


class Sharpness(torch.optim.Optimizer):
    """As in SAM: shares its groups with the optimizer inside."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()


class Several(torch.optim.Optimizer):
    """Steps two optimizers, one of them over a parameter that the groups here lack."""

    def __init__(self, parameters, contained, other):
        super().__init__(parameters, {})
        inner = [torch.optim.AdamW([*group], lr=0.1) for group in (parameters, other)]
        self.contained = contained(*inner, self)

    def step(self, closure=None):
        for optimizer in tree_leaves(self.contained):
            if optimizer is not self:
                optimizer.step()


OPTIMIZERS_INSIDE = {
    "shared groups": lambda model, own: Sharpness(model.parameters()),
    "list": lambda model, own: Several([*model.parameters()], lambda *each: [*each], [own]),
    "tuple": lambda model, own: Several([*model.parameters()], lambda *each: each, [own]),
    "dict": lambda model, own: Several([*model.parameters()], lambda *each: {"a": [each[0]], "b": each[1]}, [own]),
    "inside of an inner one": lambda model, own: Several(
        [*model.parameters()], lambda first, second, _: Sharpness(model.parameters()), [own]
    ),
}


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("name", OPTIMIZERS_INSIDE)
def test_training_with_optimizers_inside_continues_as_without_the_call(name, has_state):
    def train(with_warmup):
        torch.manual_seed(0)
        model, own = nn.Linear(3, 2), nn.Parameter(torch.ones(2))
        optimizer = OPTIMIZERS_INSIDE[name](model, own)

        def steps(number):
            for _ in range(number):
                (model(torch.ones(1, 3)) * own).square().sum().backward()
                optimizer.step()

        steps(2 if has_state else 0)
        if with_warmup:
            warmup_allocator(model, 4, optimizer=optimizer, example_batch=torch.ones(1, 4, 3))
        steps(2)
        return [*model.parameters(), own]

    for warmed, expected in zip(train(True), train(False), strict=True):
        assert warmed.equal(expected)


class Averaging(torch.optim.SGD):
    """Keeps tensors and numbers in attributes."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        parameters = self.param_groups[0]["params"]
        self.scale = torch.ones(())
        self.ema = [parameter.detach().clone() for parameter in parameters]
        self.by_name = {"first": (self.ema[0].clone(),), "counts": [0], "seen": collections.OrderedDict()}
        self.same_parameters = parameters

    def step(self, closure=None):
        super().step()
        self.scale.mul_(0.9)
        for average, parameter in zip(self.ema, self.same_parameters, strict=True):
            average.lerp_(parameter.detach(), 0.5)
        self.by_name["first"][0].add_(self.scale)
        self.by_name["counts"].append(1)
        self.by_name["seen"][len(self.by_name["counts"])] = self.ema[0].sum()
        self.by_name["new"] = torch.ones(())


def test_tensors_lists_and_dicts_in_attributes_of_an_optimizer():
    model = nn.Linear(3, 2)
    optimizer = Averaging(model.parameters())
    objects = [optimizer.scale, optimizer.ema, *optimizer.ema, optimizer.by_name, *optimizer.by_name.values()]
    before = copy.deepcopy((optimizer.scale, optimizer.ema, optimizer.by_name))
    warmup_allocator(model, 4, optimizer=optimizer, example_batch=torch.ones(1, 4, 3))
    after = optimizer.scale, optimizer.ema, optimizer.by_name
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert optimizer.by_name.keys() == before[2].keys()
    now = [optimizer.scale, optimizer.ema, *optimizer.ema, optimizer.by_name, *optimizer.by_name.values()]
    assert all(one is other for one, other in zip(objects, now, strict=True))


class Remembering(nn.Module):
    """Keeps what it has done in attributes of Python."""

    def __init__(self):
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(3)), torch.ones(3)
        self.is_initialized, self.longest, self.cache = False, 0, None
        self.lengths, self.seen, self.by_name = [], {0}, {"same": (self.scale,), "calls": [0]}
        self.by_name["itself"] = self.by_name
        self.noise = torch.Generator().manual_seed(5)
        self.on_meta, self.empty, self.freed = torch.empty(3, device="meta"), torch.empty(0), torch.empty(3)
        self.freed.untyped_storage().resize_(0)
        self.nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        self.has_run = torch.tensor(False)
        self.sparse = torch.eye(3).to_sparse()
        self.register_buffer("neighbors", torch.eye(3).to_sparse())

    def forward(self, x):
        if not self.is_initialized:
            self.is_initialized = True
            self.shift.data.copy_(-x.detach().mean((0, 1)))
        self.longest = max(self.longest, x.shape[1])
        self.cache = x.detach()
        self.lengths.append(x.shape[1])
        self.seen.add(x.shape[1])
        self.by_name["calls"][0] += 1
        self.by_name["new"] = self.scale.mul_(2)
        self.has_run.fill_(True)
        self.sparse.mul_(2)
        self.neighbors.mul_(2)
        return x + self.shift + torch.rand(3, generator=self.noise)


@pytest.mark.parametrize("fails", [False, True])
def test_attributes_of_modules(fails):
    """A layer that initializes itself in its first forward kept its flag and lost its values."""

    def loss(output, batch):
        if fails:
            raise RuntimeError("in the loss")
        return output.sum()

    model = nn.Sequential(Remembering())
    layer = model[0]
    names, objects = set(vars(layer)), [layer.scale, layer.lengths, layer.seen, layer.by_name, layer.by_name["calls"]]
    noise = torch.rand(3, generator=layer.noise.clone_state())
    with pytest.raises(RuntimeError, match="in the loss") if fails else nullcontext():
        warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 3), loss_fn=loss)
    assert set(vars(layer)) == names
    assert (layer.is_initialized, layer.longest, layer.cache) == (False, 0, None)
    now = [layer.scale, layer.lengths, layer.seen, layer.by_name, layer.by_name["calls"]]
    assert all(one is other for one, other in zip(objects, now, strict=True))
    assert (layer.lengths, layer.seen, layer.by_name["calls"]) == ([], {0}, [0])
    assert layer.by_name.keys() == {"same", "calls", "itself"}
    assert layer.scale.tolist() == [1, 1, 1]
    assert not layer.has_run
    assert layer.sparse.to_dense().equal(torch.eye(3))
    assert layer.neighbors.to_dense().equal(torch.eye(3))
    assert torch.rand(3, generator=layer.noise).equal(noise)
    model(torch.ones(1, 2, 3))
    assert layer.shift.tolist() == [-1, -1, -1]


@pytest.mark.parametrize("package", ["torch", "torch.nn.parallel", "deepspeed.runtime"])
def test_wrappers_keep_their_attributes(package):
    """What they count belongs to more than the model, such as the buckets of gradients."""
    wrapper = type("Wrapper", (nn.Module, abc.ABC), {"__module__": package})()
    own = type("Own", (type(wrapper),), {"__module__": "trainings"})()  # as fully_shard makes of a module
    with restore_afterwards(nn.ModuleList([wrapper, own])):
        wrapper.steps = own.steps = 1
    assert wrapper.steps == 1
    assert not hasattr(own, "steps")


def test_values_are_restored_without_an_optimizer():
    model, _, _ = model_and_optimizer()
    copied = model[0].weight.detach().clone()
    with restore_afterwards(model):
        model[0].weight.data.zero_()
    assert model[0].weight.equal(copied)


def test_an_unchanged_tensor_is_not_written():
    model = nn.Linear(2, 1)
    model.register_buffer("overlapping", torch.ones(1).expand(3))  # a copy into it would raise
    version = model.weight._version
    leave(model, None)
    assert model.weight._version == version


def test_parameters_require_gradients_as_before():
    model, _, _ = model_and_optimizer()
    model[0].weight.requires_grad_(False)
    with restore_afterwards(model):
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is model[0].weight)
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["0.weight"]


def test_modes_and_the_names_of_tensors():
    model, _, _ = model_and_optimizer()
    weight, mean = model[0].weight, model[1].running_mean
    model[2].eval()
    with restore_afterwards(model):
        model.eval()
        model[2].train()
        model[0].weight = nn.Parameter(torch.zeros(2, 3))
        model[0].another = nn.Parameter(torch.zeros(1))
        model[1].running_mean = torch.zeros(2)
        model[1].register_buffer("cache", torch.zeros(1))
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert model[0].weight is weight
    assert model[1].running_mean is mean
    assert not hasattr(model[0], "another")
    assert not hasattr(model[1], "cache")


def test_state_of_an_optimizer():
    model, optimizer, own = model_and_optimizer()
    weight = model[0].weight
    optimizer.state[weight]["list"] = [torch.ones(2), torch.zeros(1)]
    optimizer.state[weight]["plain"] = {"nested": [1, 2]}
    rate = optimizer.param_groups[1]["rate"] = torch.ones(())
    optimizer.calls = 1
    state, average = optimizer.state[weight], optimizer.state[weight]["exp_avg"]
    first_of_list, copied, steps = state["list"][0], average.clone(), state["step"].clone()
    with restore_afterwards(model, optimizer):
        average.add_(1)
        state["step"] += 1
        state["list"][0].zero_()
        state["list"][1] = torch.ones(7)
        state["plain"]["nested"].append(3)
        state["another"] = 1
        optimizer.state[weight] = {"exp_avg": torch.zeros(1)}
        optimizer.state[own]["exp_avg"] = torch.zeros(1)
        optimizer.state[model[2].weight] = {"step": 1}
        optimizer.param_groups[1]["lr"] = 7.0
        rate.zero_()
        optimizer.param_groups[0]["another"] = 1
        optimizer.calls, optimizer.another = 2, 1
    assert optimizer.state[weight] is state
    assert state["exp_avg"] is average
    assert average.equal(copied)
    assert state["step"].equal(steps)
    assert state["list"][0] is first_of_list
    assert [tensor.tolist() for tensor in state["list"]] == [[1, 1], [0]]
    assert state["plain"] == {"nested": [1, 2]}
    assert "another" not in state
    assert optimizer.state[own]["exp_avg"].shape == (2,)
    assert model[2].weight not in optimizer.state
    assert [group["lr"] for group in optimizer.param_groups] == [0.001, 0.5]
    assert optimizer.param_groups[1]["rate"] is rate
    assert rate == 1
    assert optimizer.param_groups[1]["params"][0] is own
    assert "another" not in optimizer.param_groups[0]
    assert optimizer.calls == 1
    assert not hasattr(optimizer, "another")


def test_state_of_a_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scale = scaler.scale(torch.ones(())) and scaler._scale
    model, optimizer, _ = model_and_optimizer()
    with restore_afterwards(model, optimizer, scaler):
        scaler._scale.fill_(1.0)
        scaler._growth_interval = 3
        scaler._per_optimizer_states[1]["stage"] = None
    assert scaler._scale is scale
    assert scaler.get_scale() == 4.0
    assert scaler._growth_interval == 2000
    assert not scaler._per_optimizer_states


def test_random_streams():
    def draw():
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    def seed():
        torch.manual_seed(3)
        random.seed(3)
        numpy.random.seed(3)

    model = nn.Linear(1, 1)
    seed()
    expected = draw()
    seed()
    with restore_afterwards(model):
        draw()
    assert draw() == expected


def test_random_streams_of_gpus(monkeypatch):
    restored = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: ["state"])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.append)
    with restore_afterwards(nn.Linear(1, 1)):
        assert not restored
    assert restored == [["state"]]


def test_sharded_parameters_are_sharded_before_they_are_read_and_afterwards(monkeypatch):
    model, calls = nn.Linear(2, 1), []
    monkeypatch.setattr(snapshot, "reshard", lambda module: calls.append((module, module.weight.sum().item())))
    total = model.weight.sum().item()
    with restore_afterwards(model):
        assert calls == [(model, total)]
        model.weight.data.fill_(9)
    assert calls == [(model, total), (model, 18)]
    assert model.weight.sum().item() == total


def test_of_a_sharded_tensor_the_local_part_is_restored():
    part = torch.ones(2)

    class Sharded(torch.Tensor):
        def to_local(self):
            return part

    values = snapshot._Values([torch.zeros(4).as_subclass(Sharded)])
    part.fill_(3)
    values.restore()
    assert part.tolist() == [1, 1]


def lora(dtype=torch.float32):
    model = nn.Sequential(nn.Linear(4, 4, dtype=dtype).requires_grad_(False), nn.Linear(4, 1, dtype=dtype))
    return model, torch.optim.AdamW(model[1].parameters())


def test_frozen_parameters_are_not_copied():
    model, optimizer = lora()
    assert {id(tensor) for tensor in snapshot._changing(model, optimizer)} == {
        id(each) for each in model[1].parameters()
    }
    optimizer.add_param_group({"params": [model[0].weight]})
    assert id(model[0].weight) in {id(tensor) for tensor in snapshot._changing(model, optimizer)}
    with restore_afterwards(model, optimizer):
        model[0].weight.data.zero_()
    assert model[0].weight.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128])
@pytest.mark.parametrize(
    "change", [lambda bias: bias[1].neg_(), lambda bias: bias.neg_(), lambda bias: bias.copy_(bias.flip(0))]
)
@pytest.mark.parametrize("piece", [2, 2**20])
def test_a_change_of_a_frozen_parameter_is_an_error(monkeypatch, piece, change, dtype):
    monkeypatch.setattr(snapshot, "_PIECE", piece)
    model, optimizer = lora(dtype)
    leave(model, optimizer)

    def change_both():
        with restore_afterwards(model, optimizer):
            change(model[0].bias.data)
            model[1].weight.data.zero_()

    with pytest.raises(RuntimeError, match=r"forward or a hook has changed 0\.bias\. Load them"):
        change_both()
    assert model[1].weight.any(), "the rest was not restored"


def test_sums_do_not_depend_on_the_default_device():
    tensor = torch.randn(9)
    with other_defaults():
        got = snapshot._sum_of_bits(tensor)
    assert torch.equal(got, snapshot._sum_of_bits(tensor))


@pytest.mark.parametrize(("device", "through_buffers"), [("cuda", True), ("cpu", False)])
def test_tensors_of_gpus_are_copied_through_buffers(device, through_buffers):
    with FakeTensorMode():
        assert snapshot._is_on_gpu(torch.empty(1, device=device)) is through_buffers


class LargestResult(TorchDispatchMode):
    """The most bytes that a result takes. Views of the parameter have another dtype."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.int64:
            self.bytes = max(self.bytes, result.nbytes)
        return result


def test_a_sum_over_many_elements_takes_little_memory():
    parameter = torch.ones(2**22 + 1, dtype=torch.int8)
    with LargestResult() as largest:
        snapshot._sum_of_bits(parameter)
    assert largest.bytes == 32 * 2**20


def test_signs_that_cancel_in_a_regular_sum():
    signs = torch.tensor([1.0, -1, -1, 1, -1, 1, 1, -1])
    assert not torch.equal(snapshot._sum_of_bits(signs), snapshot._sum_of_bits(-signs))


def test_a_sum_shows_changes_in_the_first_and_the_last_of_many_pieces(monkeypatch):
    """A regular sum would not change."""
    monkeypatch.setattr(snapshot, "_PIECE", 8)
    bits = torch.randint(100, (300,), dtype=torch.int32)
    before = snapshot._sum_of_bits(bits)
    for place in (0, 297):
        changed = bits.clone()
        changed[place : place + 3] += torch.tensor([1, -2, 1], dtype=torch.int32)
        assert not torch.equal(snapshot._sum_of_bits(changed), before)


def test_weights_are_numbers_of_splitmix(monkeypatch):
    """Against integers of Python: the finalizer of 1, 2, ..., for each piece anew."""
    monkeypatch.setattr(snapshot, "_PIECE", 3)
    bits = torch.tensor([5, -7, 2**30, 11, -(2**31)], dtype=torch.int32)

    def signed(number):
        return (number + 2**63) % 2**64 - 2**63

    def weight(number):
        for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
            number = signed(number * factor)
            number ^= number >> 29
        return number

    def sum_of(piece):
        return sum(number * weight(place) for place, number in enumerate(piece, 1))

    expected = 3 * sum_of(bits[:3].tolist()) + sum_of(bits[3:].tolist())
    assert snapshot._sum_of_bits(bits).item() == signed(expected)


def test_three_elements_of_one_byte():
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_parameter("frozen", nn.Parameter(torch.tensor([1, 2, 3], dtype=torch.int8), requires_grad=False))
    model.register_buffer("flags", torch.tensor([True, False, True]))
    with restore_afterwards(model):
        model.flags.logical_not_()
    assert model.flags.tolist() == [True, False, True]


@pytest.mark.parametrize(
    "buffer",
    [
        pytest.param(torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8), id="quantized"),
        pytest.param(torch.randn(4, dtype=torch.complex64).conj(), id="conjugated"),
    ],
)
def test_buffers_whose_memory_shows_no_values(buffer):
    model = nn.Linear(2, 2)
    model.register_buffer("held", buffer)
    with restore_afterwards(model):
        pass
    assert model.held is buffer


def test_all_copies_are_counted_before_the_first(monkeypatch):
    """Buffers, parameters, optimizer state and the scaler's tensors, for each process of the host."""
    model, optimizer, _ = model_and_optimizer()
    model[0].requires_grad_(False)  # still in the optimizer
    model.append(nn.Linear(100, 100).requires_grad_(False))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    copied = []
    values = snapshot._Values.__init__
    monkeypatch.setattr(
        snapshot._Values, "__init__", lambda self, tensors, _: copied.extend(tensors) or values(self, tensors)
    )
    leave(model, optimizer, scaler)
    needed = 3 * sum(tensor.nbytes for tensor in copied)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    monkeypatch.setattr(snapshot.HostMemory, "free", lambda _: (needed, 2**40))
    snapshot.check_host_memory(model, optimizer, scaler)
    monkeypatch.setattr(snapshot.HostMemory, "free", lambda _: (needed - 1, 2**40))
    with pytest.raises(MemoryError, match="0 MiB for 3 processes, but 0 MiB are available"):
        snapshot.check_host_memory(model, optimizer, scaler)
    with pytest.raises(MemoryError, match="for 3 processes"):
        warmup_allocator(model, 8, optimizer=optimizer, grad_scaler=scaler, example_batch=torch.ones(1, 3))
    monkeypatch.setattr(snapshot.HostMemory, "free", lambda _: (0, 0))  # not Linux
    snapshot.check_host_memory(model, optimizer, scaler)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_the_sign_of_zero_is_restored(layout):
    tensor = torch.zeros(2, 2, 2, 2).contiguous(memory_format=layout)
    values = snapshot._Values([tensor])
    tensor.neg_()
    values.restore()
    assert not tensor.signbit().any()
