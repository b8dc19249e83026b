"""After warmup_allocator everything is bit for bit as before, also after an error; training continues as without it."""

import contextlib
import copy
import itertools
import random

import numpy
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.tensor import DTensor

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator import snapshot
from seqwarm_kernels.allocator.snapshot import restored

from ..support.same import assert_same
from .kinds import MAX_LEN, TRAININGS, VALUES, WORDS
from .traces import contents, everything, identities

pytestmark = pytest.mark.usefixtures("process_group")


def loss_fn(output, batch):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), batch["input_ids"].flatten())


def train(model, optimizer, steps):
    """The gradients of the last step are kept."""
    for _ in range(steps):
        batch = {"input_ids": torch.randint(WORDS, (2, 6))}
        optimizer.zero_grad()
        loss_fn(model(**batch), batch).backward()
        optimizer.step()


def make(name):
    for seed in (torch.manual_seed, random.seed, numpy.random.seed):
        seed(3)
    make_model, optimizer_class, options = TRAININGS[name]
    model = make_model()
    return model, optimizer_class(model.parameters(), **copy.deepcopy(options))


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, error):
        ctx.error = error
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ctx.error


def fails_at(model, optimizer, where, error):
    """Return the handle of a hook that raises in the second forward, at the end of backward, or after a step."""
    calls = itertools.count(1)

    def fail(*_):
        if where != "forward" or next(calls) == 2:
            raise error

    inner = getattr(model, "module", model)
    if where == "forward":
        return inner.head.register_forward_pre_hook(fail)
    if where == "optimizer":
        return optimizer.register_step_post_hook(fail)
    # The last layer in backward, so that the backward of every other layer has started.
    return inner.embedding.register_forward_hook(lambda module, inputs, output: Failing.apply(output, error))


BUG, OUT_OF_MEMORY = KeyError("a bug"), torch.OutOfMemoryError("CUDA out of memory.")


ENDINGS = [
    *((name, None, None) for name in TRAININGS if name != "fully_shard of the whole"),
    *(("random numbers", where, BUG) for where in ("forward", "backward", "optimizer")),
    *((name, "backward", BUG) for name in ("DistributedDataParallel", "fully_shard")),
    ("fully_shard", "backward", OUT_OF_MEMORY),
]


@pytest.mark.parametrize(("name", "where", "error"), ENDINGS)
def test_training_continues_as_without_the_call(name, where, error):
    results = []
    for warmed in (False, True):
        model, optimizer = make(name)
        train(model, optimizer, 2)
        if warmed:
            scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
            options = {"batch_size": 4, "loss_fn": loss_fn, "optimizer": optimizer, "grad_scaler": scaler}
            options["scheduler"] = SequenceLengthScheduler(4, MAX_LEN, duration=10, step_size=4)

            def state(model=model, optimizer=optimizer, scaler=scaler):
                return [everything(model, optimizer), identities(model, optimizer), scaler.state_dict()]

            before = state()
            handle = None if where is None else fails_at(model, optimizer, where, error)
            with pytest.raises(KeyError, match="a bug") if error is BUG else contextlib.nullcontext():
                report = warmup_allocator(model, MAX_LEN, **options)
                assert (report.out_of_memory is None) == (error is None)
            if handle is not None:
                handle.remove()
            assert_same(before, state())
        train(model, optimizer, 3)
        results.append(everything(model, optimizer))
    assert_same(*results)


@pytest.mark.parametrize("is_evaluated", [False, True])
def test_a_sharded_model_may_be_left_unsharded_before_and_is_saved_afterwards(is_evaluated):
    """fully_shard leaves parameters unsharded after a forward without a backward, and adds its hooks of state dicts in
    the first forward alone."""
    model, optimizer = make("fully_shard of the whole")

    def evaluate():
        with torch.no_grad():
            model.eval()(torch.randint(WORDS, (2, 6)))
        assert not isinstance(model.head.weight, DTensor)

    if is_evaluated:
        evaluate()
    warmup_allocator(model.train(), MAX_LEN, loss_fn=loss_fn, optimizer=optimizer)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    train(model, optimizer, 2)
    evaluate()
    weights, state = get_state_dict(model, optimizer)
    assert state["state"].keys() == weights.keys()


class Holder(nn.Module):
    """Changes in its forward what it holds, and itself."""

    def __init__(self, value, change):
        super().__init__()
        self.scale, self.value, self.change, self.count = nn.Parameter(torch.ones(())), value, change, 3

    def forward(self, x):
        self.change(self.value)
        self.value, self.made, self.count = None, x, self.count + 1
        self.scale = nn.Parameter(torch.zeros(()))
        raise KeyError("inside")


@pytest.mark.parametrize("name", VALUES)
def test_values_that_modules_hold(name):
    make_value, change = VALUES[name]
    value = make_value()
    model, view = Holder(value, change), value.detach() if isinstance(value, torch.Tensor) else None
    before, names, scale = contents(value), sorted(vars(model)), model.scale
    with pytest.raises(KeyError, match="inside"):
        warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 3))
    assert model.value is value
    assert contents(value) == before
    assert view is None or view.is_nested or view.data_ptr() == value.data_ptr(), "views share their memory no more"
    assert (sorted(vars(model)), model.count) == (names, 3)
    assert model.scale is scale


def test_values_that_cannot_be_copied_stay():
    model = nn.Linear(1, 1)
    read_only = numpy.ones(3)
    read_only.flags.writeable = False
    freed = torch.empty(3)
    freed.untyped_storage().resize_(0)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.strided)
    model.held = values = [torch.empty(3, device="meta"), torch.eye(2).to_sparse(), nested, freed, read_only]
    with restored(model):
        model.held = None
    assert model.held is values


def small_training():
    """With gradients and state. The optimizer has a parameter of its own, and no state for the last one."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
    own = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": model[:2].parameters()}, {"params": [own, model[2].weight], "lr": 0.5}])
    (model[:2](torch.randn(4, 3)).square().sum() + own.sum()).backward()
    optimizer.step()
    return model, optimizer, own


def test_gradients_flags_and_names_of_tensors():
    """Gradients are None inside the block."""
    model, optimizer, own = small_training()
    model[0].weight.requires_grad_(False)
    model[2].eval()
    tensors = [*model.parameters(), own]
    version = model[0].weight._version
    before, before_ids = everything(model, optimizer), identities(model, optimizer)
    gradient = own.grad
    with restored(model, optimizer):
        assert all(tensor.grad is None for tensor in tensors)
        for tensor in tensors:
            tensor.data.fill_(9)
            tensor.grad = torch.ones_like(tensor)
            tensor.requires_grad_(not tensor.requires_grad)
        for module in model.modules():
            module.train(not module.training)
        model[0].weight = nn.Parameter(torch.zeros(2, 3))
        model[0].another = nn.Parameter(torch.zeros(1))
        model[1].running_mean = torch.zeros(2)
        model[1].register_buffer("cache", torch.zeros(1))
    assert_same(before, everything(model, optimizer))
    assert before_ids == identities(model, optimizer)
    assert own.grad is gradient
    assert model[0].weight._version == version, "graphs from before would be refused"


def test_state_and_settings_of_an_optimizer_and_a_scaler():
    model, optimizer, own = small_training()
    weight, scaler = model[0].weight, torch.amp.GradScaler("cpu", init_scale=4.0)
    scale = scaler.scale(torch.ones(())) and scaler._scale
    optimizer.state[weight]["list"] = [torch.ones(2), torch.zeros(1)]
    optimizer.param_groups[1]["rate"] = rate = torch.ones(())
    optimizer.calls = 1
    before, before_ids, state = everything(model, optimizer), identities(model, optimizer), optimizer.state[weight]
    with restored(model, optimizer, scaler):
        state["exp_avg"].add_(1)
        state["list"][0].zero_()
        state["list"][1] = torch.ones(7)
        state["another"] = 1
        optimizer.state[weight] = {"exp_avg": torch.zeros(1)}
        optimizer.state[own]["exp_avg"] = torch.zeros(1)
        optimizer.state[model[2].weight] = {"step": 1}
        optimizer.param_groups[1].update(lr=7.0, rate=3)
        rate.zero_()
        optimizer.param_groups[0]["another"] = 1
        optimizer.calls, optimizer.another = 2, 1
        scaler._scale.fill_(1.0)
        scaler._growth_interval = 3
        scaler._per_optimizer_states[1]["stage"] = None
    assert_same(before, everything(model, optimizer))
    assert before_ids == identities(model, optimizer)
    assert optimizer.state[weight] is state
    assert optimizer.param_groups[1]["params"][0] is own
    assert (scaler._scale is scale, scaler.get_scale(), scaler._growth_interval) == (True, 4.0, 2000)
    assert not scaler._per_optimizer_states


def test_random_states_of_gpus(monkeypatch):
    states = {0: "first", 1: "second"}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    with restored(nn.Linear(1, 1)):
        states.update({0: "drawn", 1: "drawn"})
    assert states == {0: "first", 1: "second"}


def test_a_buffer_that_becomes_a_weight_does_not_overwrite_it():
    model = nn.Linear(2, 2)
    model.register_buffer("average", torch.zeros(2, 2))
    weight = model.weight.detach().clone()
    with restored(model):
        model.average.data = model.weight.data
    assert model.weight.equal(weight)
    assert not model.average.any()


def test_an_error_in_one_tensor_leaves_no_other_behind(monkeypatch):
    model, optimizer, _ = small_training()
    before = everything(model, optimizer)
    weight, restore = model[1].weight, snapshot._TensorCopy.restore

    def fails_once(self):
        restore(self)
        if self.tensor is weight:
            raise KeyError("no memory")

    monkeypatch.setattr(snapshot._TensorCopy, "restore", fails_once)
    with pytest.raises(KeyError, match="no memory"), restored(model, optimizer):  # noqa: PT012
        model(torch.randn(4, 3)).sum().backward()
        optimizer.step()
    assert_same(before, everything(model, optimizer))


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
    assert (wrapper.steps, wrapper.training, hasattr(own, "steps")) == (1, True, False)


def test_parameters_are_sharded_before_they_are_restored(monkeypatch):
    model, calls = nn.Linear(2, 1), []
    monkeypatch.setattr(snapshot, "reshard", lambda module: calls.append((module, module.weight.sum().item())))
    with restored(model):
        model.weight.data.fill_(9)
    assert calls == [(model, 18)]


def test_host_memory_for_all_copies(monkeypatch):
    """Of buffers, parameters and optimizer state, for each process of the host."""
    model, optimizer, own = small_training()
    states = [value for state in optimizer.state.values() for value in state.values()]
    needed = 3 * sum(tensor.nbytes for tensor in [*model.parameters(), *model.buffers(), own, *states])
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for memory in ((needed, 2**40), (0, 0)):  # 0, 0: not Linux
        monkeypatch.setattr(snapshot.HostMemory, "free", lambda _, free=memory: free)
        with restored(model, optimizer):
            pass
    monkeypatch.setattr(snapshot.HostMemory, "free", lambda _: (needed - 1, 2**40))
    gradient = model[0].weight.grad
    with pytest.raises(MemoryError, match="host memory"):
        warmup_allocator(model, 8, optimizer=optimizer, example_batch=torch.ones(1, 3))
    assert model[0].weight.grad is gradient
