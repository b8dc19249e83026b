"""What `restored` restores: each thing that a block may change is as before, and the same object."""

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import pytest
import torch
from torch import nn

from seqwarm_kernels import warmup_allocator
from seqwarm_kernels.allocator import snapshot
from seqwarm_kernels.allocator.snapshot import restored


def model_and_optimizer():
    """With gradients and state. The optimizer has a parameter of its own, and no state for the last one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    own = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": [own, model[2].weight], "lr": 0.5}])
    (model[:2](torch.randn(4, 3)).square().sum() + own.sum()).backward()
    optimizer.step()
    return model, optimizer, own


def test_gradients_are_none_inside_and_the_same_tensors_afterwards():
    model, optimizer, own = model_and_optimizer()
    tensors = [*model.parameters(), own]
    gradients = [tensor.grad for tensor in tensors]
    copies = copy.deepcopy(gradients)
    with restored(model, optimizer):
        assert all(tensor.grad is None for tensor in tensors)
        for tensor in tensors:
            tensor.grad = torch.ones_like(tensor)
    for tensor, gradient, copied in zip(tensors, gradients, copies, strict=True):
        assert tensor.grad is gradient
        assert gradient is None or gradient.equal(copied)
    assert gradients[-1] is not None
    assert None in gradients


def test_flags_and_the_names_of_tensors():
    model, _, _ = model_and_optimizer()
    weight, mean = model[0].weight.requires_grad_(False), model[1].running_mean
    model[2].eval()
    with restored(model):
        model.eval()
        model[2].train()
        for parameter in model.parameters():
            parameter.requires_grad_(parameter is weight)
        model[0].weight = nn.Parameter(torch.zeros(2, 3))
        model[0].another = nn.Parameter(torch.zeros(1))
        model[1].running_mean = torch.zeros(2)
        model[1].register_buffer("cache", torch.zeros(1))
    assert [module.training for module in model.modules()] == [True, True, True, False]
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["0.weight"]
    assert model[0].weight is weight
    assert model[1].running_mean is mean
    assert not hasattr(model[0], "another")
    assert not hasattr(model[1], "cache")


#: Each with a value that a sum, a comparison of numbers or a change of dtype would miss.
TENSORS = {
    "zeros with signs": lambda: torch.tensor([0.0, -0.0, 1.5]),
    "not a number": lambda: torch.tensor([float("nan"), float("inf")]),
    "integers beyond floats": lambda: torch.tensor([2**53 + 1, -(2**62)]),
    "flags": lambda: torch.tensor([True, False, True]),
    "bytes": lambda: torch.tensor([1, 2, 3], dtype=torch.int8),
    "half": lambda: torch.tensor([1.0, -2.0], dtype=torch.bfloat16),
    "empty": lambda: torch.empty(0),
    "number": lambda: torch.tensor(3.0),
    "byte": lambda: torch.tensor(3, dtype=torch.uint8),
    "channels last": lambda: torch.randn(2, 3, 2, 2).contiguous(memory_format=torch.channels_last),
    "every other": lambda: torch.randn(5)[::2],
    "expanded": lambda: torch.ones(1).expand(3),
    "overlapping": lambda: torch.arange(5.0).unfold(0, 3, 1),
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
}


def bits(tensor):
    if tensor.is_nested:
        tensor = tensor.values()
    return tensor.untyped_storage().tolist()


@pytest.mark.parametrize("name", TENSORS)
def test_contents_after_an_error(name):
    model = nn.Linear(2, 2).requires_grad_(False)  # frozen parameters, too
    held = TENSORS[name]()
    model.register_buffer("held", held)
    before, weight, version = bits(held), model.weight.clone(), model.weight._version
    with pytest.raises(KeyError, match="inside"), restored(model):  # noqa: PT012
        for tensor in (held.values() if held.is_nested else held, model.weight):
            storage = tensor.untyped_storage()
            torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_not_()
        raise KeyError("inside")
    assert model.held is held
    assert bits(held) == before
    assert model.weight.equal(weight)
    assert model.weight._version == version, "graphs from before would be refused"


def shrink(tensor):
    tensor.resize_(1)
    tensor.untyped_storage().resize_(4)


RELAID = {
    "other memory": lambda tensor: setattr(tensor, "data", torch.full((2, 3), 9.0)),
    "other dtype": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "longer": lambda tensor: tensor.resize_(1000).fill_(9),
    "shorter in less memory": shrink,
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "transposed": lambda tensor: tensor.t_().mul_(2),
}


@pytest.mark.parametrize("name", RELAID)
def test_tensors_that_were_laid_elsewhere(name):
    """As by `param.data = momentum * param.data + ...` in the forward of a teacher."""
    model = nn.Module()
    model.register_buffer("whole", torch.arange(6.0).view(2, 3))
    whole, row = model.whole, model.whole[1]
    with restored(model):
        RELAID[name](model.whole)
    assert model.whole is whole
    assert whole.tolist() == [[0, 1, 2], [3, 4, 5]]
    row[0] = 7
    assert whole[1, 0] == 7, "views do not share their memory any more"


def test_a_buffer_that_becomes_a_weight_does_not_overwrite_it():
    model = nn.Linear(2, 2)
    model.register_buffer("average", torch.zeros(2, 2))
    weight = model.weight.detach().clone()
    with restored(model):
        model.average.data = model.weight.data
    assert model.weight.equal(weight)
    assert not model.average.any()


def test_an_error_in_one_tensor_leaves_no_other_behind(monkeypatch):
    model, optimizer, _ = model_and_optimizer()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    weight, restore = model[1].weight, snapshot._TensorCopy.restore

    def fails_once(self):
        restore(self)
        if self.tensor is weight:
            raise KeyError("no memory")

    monkeypatch.setattr(snapshot._TensorCopy, "restore", fails_once)
    with pytest.raises(KeyError, match="no memory"), restored(model, optimizer):  # noqa: PT012
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    torch.testing.assert_close((model.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


def test_state_of_an_optimizer():
    model, optimizer, own = model_and_optimizer()
    weight = model[0].weight
    optimizer.state[weight]["list"] = [torch.ones(2), torch.zeros(1)]
    rate = optimizer.param_groups[1]["rate"] = torch.ones(())
    optimizer.calls = 1
    state, average = optimizer.state[weight], optimizer.state[weight]["exp_avg"]
    first_of_list, copied, steps = state["list"][0], average.clone(), state["step"].clone()
    with restored(model, optimizer):
        average.add_(1)
        state["step"] += 1
        state["list"][0].zero_()
        state["list"][1] = torch.ones(7)
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


class Sharpness(torch.optim.Optimizer):
    """As in SAM: shares its groups with the optimizer inside."""

    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, lr=0.1)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()


class Several(torch.optim.Optimizer):
    """Steps optimizers in a list."""

    def __init__(self, parameters):
        parameters = list(parameters)
        super().__init__(parameters, {})
        self.optimizers = [torch.optim.AdamW([each], lr=0.1) for each in parameters]

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("has_state", [True, False])
@pytest.mark.parametrize("optimizer_class", [Sharpness, Several])
def test_optimizers_that_an_optimizer_holds(optimizer_class, has_state):
    def train(with_warmup):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = optimizer_class(model.parameters())

        def steps(number):
            for _ in range(number):
                model(torch.ones(1, 3)).square().sum().backward()
                optimizer.step()

        steps(2 if has_state else 0)
        if with_warmup:
            warmup_allocator(model, 4, optimizer=optimizer, example_batch=torch.ones(1, 4, 3))
        steps(2)
        return list(model.parameters())

    for warmed, expected in zip(train(True), train(False), strict=True):
        assert warmed.equal(expected)


def test_state_of_a_grad_scaler():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scale = scaler.scale(torch.ones(())) and scaler._scale
    model, optimizer, _ = model_and_optimizer()
    with restored(model, optimizer, scaler):
        scaler._scale.fill_(1.0)
        scaler._growth_interval = 3
        scaler._per_optimizer_states[1]["stage"] = None
    assert scaler._scale is scale
    assert scaler.get_scale() == 4.0
    assert scaler._growth_interval == 2000
    assert not scaler._per_optimizer_states


def test_random_states():
    def draw():
        return torch.rand(1).item(), random.random(), numpy.random.rand()

    model, before = nn.Linear(1, 1), (torch.get_rng_state(), random.getstate(), numpy.random.get_state())
    expected = draw()
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    numpy.random.set_state(before[2])
    with restored(model):
        draw()
    assert draw() == expected


def test_random_states_of_gpus(monkeypatch):
    states = {0: "first", 1: "second"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    with restored(nn.Linear(1, 1)):
        states.update({0: "drawn", 1: "drawn"})
    assert states == {0: "first", 1: "second"}


#: A value of an attribute, how a forward changes it, and what to compare.
ATTRIBUTES = {
    "plain": (lambda: 3, None, lambda value: value),
    "tensor": (lambda: torch.ones(3), lambda value: value.mul_(2), lambda value: value.tolist()),
    "list": (lambda: [1, 2], lambda value: value.append(3), list),
    "tensors in a list": (lambda: [torch.ones(2)], lambda value: value[0].zero_(), lambda value: value[0].tolist()),
    "tensors in a tuple": (lambda: (torch.ones(2),), lambda value: value[0].zero_(), lambda value: value[0].tolist()),
    "dict": (
        lambda: {"a": 1, "b": 2},
        lambda value: (value.pop("a"), value.update(a=1)),
        lambda value: [*value.items()],
    ),
    "OrderedDict": (
        lambda: OrderedDict(a=1, b=2),
        lambda value: value.move_to_end("a"),
        lambda value: [*value.items()],
    ),
    "defaultdict": (lambda: defaultdict(int), lambda value: value["new"], dict),
    "set": (lambda: {1}, lambda value: value.add(2), set),
    "Counter": (lambda: Counter("aab"), lambda value: value.update("a"), dict),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda value: value.append(3), lambda value: ([*value], value.maxlen)),
    "array": (lambda: numpy.ones(3), lambda value: value.fill(2), lambda value: value.tolist()),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(5),
        lambda value: torch.rand(3, generator=value),
        lambda value: torch.rand(3, generator=value.clone_state()).tolist(),
    ),
    "numpy Generator": (
        lambda: numpy.random.default_rng(5),
        lambda value: value.random(),
        lambda value: copy.deepcopy(value).random(),
    ),
    "entries of a dict": (
        lambda: {"seen": [1], "sum": torch.zeros(2)},
        lambda value: (value["seen"].append(3), value["sum"].add_(1)),
        str,
    ),
    "numpy RandomState": (
        lambda: numpy.random.RandomState(5),
        lambda value: value.rand(),
        lambda value: copy.deepcopy(value).rand(),
    ),
    "random.Random": (lambda: random.Random(5), lambda value: value.random(), lambda value: copy.copy(value).random()),
}


class Holder(nn.Module):
    def __init__(self, value, change):
        super().__init__()
        self.scale, self.value, self.change = nn.Parameter(torch.ones(())), value, change

    def forward(self, x):
        if self.change is None:
            self.value = None
        else:
            self.change(self.value)
        self.made = x
        return x * self.scale


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_of_modules(name):
    make, change, shown = ATTRIBUTES[name]
    value = make()
    model = nn.Sequential(Holder(value, change))
    warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 3))
    assert model[0].value is value
    assert shown(value) == shown(make())
    assert not hasattr(model[0], "made")


def test_values_that_cannot_be_copied_stay():
    model = nn.Linear(1, 1)
    read_only = numpy.ones(3)
    read_only.flags.writeable = False
    freed = torch.empty(3)
    freed.untyped_storage().resize_(0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    values = [torch.empty(3, device="meta"), torch.eye(2).to_sparse(), nested, freed, read_only]
    model.held = values
    with restored(model):
        model.held = None
    assert model.held is values


class Filling(nn.Module):
    """Makes its parameters and layers in its first forward."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.shifts, self.scales, self.layers = nn.ParameterList(), nn.ParameterDict(), nn.ModuleList()

    def forward(self, input_ids):
        hidden = self.embedding(input_ids)
        if not len(self.shifts):
            self.shifts.append(nn.Parameter(torch.randn(4)))
            self.scales["first"] = nn.Parameter(torch.randn(4))
            self.layers.append(nn.Linear(4, 4))
        return self.layers[0](hidden + self.shifts[0]) * self.scales["first"]


def test_containers_that_the_first_forward_fills():
    losses = []
    for is_warmed in (False, True):
        torch.manual_seed(0)
        model = Filling()
        if is_warmed:
            warmup_allocator(model, 8, batch_size=2)
            assert [len(each) for each in (model.shifts, model.scales, model.layers)] == [0, 0, 0]
        losses.append(model(torch.arange(5)[None]).square().mean().item())
    assert losses[0] == losses[1]


def test_wrappers_of_torch_keep_their_attributes():
    """What they count belongs to more than the model, such as the buckets of gradients."""
    wrapper = type("Wrapper", (nn.Module,), {"__module__": "torch.nn.parallel.distributed"})()
    own = type("Own", (type(wrapper),), {"__module__": "trainings"})()  # as fully_shard makes of a module
    with restored(nn.ModuleList([wrapper, own])):
        wrapper.steps = own.steps = 1
        wrapper.training = False
    assert wrapper.steps == 1
    assert wrapper.training
    assert not hasattr(own, "steps")


def test_sharded_parameters_are_sharded_before_they_are_read_and_afterwards(monkeypatch):
    model, calls = nn.Linear(2, 1), []
    monkeypatch.setattr(snapshot, "reshard", lambda module: calls.append((module, module.weight.sum().item())))
    total = model.weight.sum().item()
    with restored(model):
        assert calls == [(model, total)]
        model.weight.data.fill_(9)
    assert calls == [(model, total), (model, 18)]
    assert model.weight.sum().item() == total


def test_host_memory_for_all_copies(monkeypatch):
    """Of buffers, parameters and optimizer state, for each process of the host."""
    model, optimizer, _ = model_and_optimizer()
    states = [value for state in optimizer.state.values() for value in state.values()]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors = {id(each): each for each in [*model.parameters(), *model.buffers(), *parameters, *states]}.values()
    needed = 3 * sum(tensor.nbytes for tensor in tensors)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for available, total in ((needed, 2**40), (0, 0)):  # 0, 0: not Linux
        monkeypatch.setattr(snapshot.HostMemory, "free", lambda _, free=(available, total): free)
        with restored(model, optimizer):
            pass
    monkeypatch.setattr(snapshot.HostMemory, "free", lambda _: (needed - 1, 2**40))
    gradient = model[0].weight.grad
    with pytest.raises(MemoryError, match="needs 0 MiB of host memory for copies of 3 processes, 0 MiB are available"):
        warmup_allocator(model, 8, optimizer=optimizer, example_batch=torch.ones(1, 3))
    assert model[0].weight.grad is gradient
