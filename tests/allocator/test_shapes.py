"""Tensors whose shape or storage a forward has changed in place, and tensors that cannot be restored."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from seqwarm_kernels import warmup_allocator
from seqwarm_kernels.allocator import snapshot
from seqwarm_kernels.allocator.places import Place
from seqwarm_kernels.allocator.snapshot import restore_afterwards


def swap(tensor):
    tensor.data = torch.full((7,), 9.0)


def shrink(tensor):
    tensor.resize_(1)
    tensor.untyped_storage().resize_(4)


CHANGES = {
    "longer": lambda tensor: tensor.resize_(1000).fill_(9),
    "shorter": lambda tensor: tensor.resize_(1).fill_(9),
    "shorter in less memory": shrink,
    "empty": lambda tensor: tensor.resize_(0),
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "transposed": lambda tensor: tensor.t_().mul_(2),
    "other memory": swap,
    "other dtype": lambda tensor: setattr(tensor, "data", tensor.double()),
    "nothing": lambda tensor: tensor.mul_(2),
}


#: torch resizes nothing that requires a gradient.
OF_PARAMETERS = ("freed", "transposed", "other memory", "other dtype", "nothing")


@pytest.mark.parametrize(
    ("name", "parameter"), [*((name, False) for name in CHANGES), *((name, True) for name in OF_PARAMETERS)]
)
def test_shapes_are_restored(name, parameter):
    model, values = nn.BatchNorm1d(2), torch.tensor([[0.0, -0.0, 1.5], [2, 3, 4]])
    tensor = nn.Parameter(values.clone()) if parameter else values.clone()
    getattr(model, "register_parameter" if parameter else "register_buffer")("cache", tensor)
    with restore_afterwards(model), torch.no_grad():
        CHANGES[name](model.cache)
        model.running_mean.add_(1)
    assert model.cache is tensor
    assert (tensor.shape, tensor.stride(), tensor.dtype) == ((2, 3), (3, 1), torch.float32)
    assert tensor.equal(values)
    assert tensor.signbit().equal(values.signbit())
    assert tensor.requires_grad is parameter
    assert not model.running_mean.any()


def test_views_still_share_their_memory():
    model = nn.Module()
    model.register_buffer("whole", torch.arange(6.0))
    model.register_buffer("part", model.whole[2:4])
    with restore_afterwards(model):
        model.whole.resize_(1000).zero_()
        model.part.resize_(1)
    model.whole[2] = 7
    assert model.whole.tolist() == [0, 1, 7, 3, 4, 5]
    assert model.part.tolist() == [7, 3]


def test_the_memory_of_another_tensor_is_not_written():
    model = nn.Linear(3, 3)
    model.register_buffer("cache", torch.zeros(2))
    weight = model.weight.detach().clone()
    with restore_afterwards(model):
        model.cache.data = model.weight.data
    assert model.cache.tolist() == [0, 0]
    assert model.weight.equal(weight)


class Following(nn.Module):
    """A buffer of the weight's shape becomes the weight in each forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=False)
        self.register_buffer("average", torch.zeros(4, 4))

    def forward(self, x):
        self.average.data = self.linear.weight.data
        return self.linear(x)


def test_a_buffer_of_the_same_shape_becomes_a_weight():
    model = Following()
    weight, address = model.linear.weight.detach().clone(), model.average.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    warmup_allocator(model, 3, example_batch={"x": torch.randn(2, 3, 4)}, optimizer=optimizer)
    assert model.linear.weight.equal(weight)
    assert not model.average.any()
    assert model.average.data_ptr() == address


def on_one_buffer(model):
    """Lay all parameters on one flat tensor, as ZeroRedundancyOptimizer does, and return it."""
    parameters = list(model.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece.view_as(parameter)
    return flat


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        lambda tensor: tensor.clamp(-0.01, 0.01),
        lambda tensor: tensor.clone(),
        lambda tensor: tensor.double(),
        lambda tensor: torch.zeros(9),
    ],
    ids=["clamped", "cloned", "other dtype", "other shape"],
)
def test_parameters_on_a_flat_buffer_stay_there(change, frozen):
    model = nn.Linear(3, 2).requires_grad_(not frozen)
    flat = on_one_buffer(model)
    before = flat.clone()
    with restore_afterwards(model):
        for parameter in model.parameters():
            parameter.data = change(parameter.data)
    assert flat.equal(before)
    flat.fill_(5)
    assert model.weight.eq(5).all()
    assert model.bias.eq(5).all()


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("is_flat", [False, True])
def test_swapped_parameters(is_flat, frozen):
    model = nn.ParameterDict({"a": torch.zeros(2, 2), "b": torch.ones(2, 2)})
    model["a"].requires_grad_(not frozen)
    if is_flat:
        on_one_buffer(model)
    a, b = model["a"], model["b"]
    addresses = a.data_ptr(), b.data_ptr()
    with restore_afterwards(model):
        a.data, b.data = b.data, a.data
    assert (a.data_ptr(), b.data_ptr()) == addresses
    assert a.eq(0).all()
    assert b.eq(1).all()


def test_tied_parameters_that_part_share_their_memory_again():
    model = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(3)})
    model["b"].data = model["a"].data
    with restore_afterwards(model):
        model["b"].data = model["b"].data.clone().fill_(7)
    assert model["b"].eq(0).all()
    model["a"].data.fill_(2)
    assert model["b"].eq(2).all()


def test_memory_that_was_freed_after_it_was_replaced():
    model = nn.Linear(2, 2, bias=False)
    before, flat = model.weight.detach().clone(), on_one_buffer(model)
    with restore_afterwards(model):
        model.weight.data = torch.zeros(2, 2)
        flat.untyped_storage().resize_(0)
    size = flat.untyped_storage().nbytes()
    assert size == 16  # a failure that prints the tensor would read memory that is not there
    assert model.weight.equal(before)
    assert flat.equal(before.flatten())


class OwnParameter(nn.Parameter):
    """Of another class, whose functions refuse."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        refused = {"set_", "untyped_storage", "stride"}
        if getattr(function, "__name__", "") in refused:
            raise TypeError(f"no {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


def of_inference():
    with torch.inference_mode():
        return torch.zeros(3)


OTHERS = {
    "class": lambda: OwnParameter(torch.zeros(3)),
    "inference": of_inference,
    "conjugate": lambda: torch.zeros(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.zeros(3)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_tensors_that_become_a_weight(kind):
    model = nn.Module()
    tensor = OTHERS[kind]()
    model.weight = nn.Parameter(torch.ones(3, dtype=tensor.dtype))
    model.register_buffer("other", tensor)
    views = tensor.is_conj(), tensor.is_neg()
    with restore_afterwards(model):
        tensor.data = model.weight.data
    assert model.weight.eq(1).all()
    assert tensor.eq(0).all()
    assert (tensor.is_conj(), tensor.is_neg()) == views


def test_a_storage_never_shrinks():
    """What is not in the model may use the rest of it."""
    whole = torch.arange(4.0)
    part = whole[:2]
    place = Place(part)
    whole.resize_(1000).fill_(3)
    part.resize_(1)
    place.restore()
    assert (part.tolist(), whole.tolist()) == ([3, 3], [3] * 1000)


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("cache", torch.zeros(2))
        self.words, self.norm = nn.Embedding(20, 4), nn.BatchNorm1d(4)

    def forward(self, ids):
        self.cache.resize_(ids.shape[1])
        return self.norm(self.words(ids).transpose(1, 2)) + self.cache.fill_(1)


@pytest.mark.parametrize("fails", [False, True])
def test_a_cache_that_grows(fails):
    model = Cached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def loss(output, batch):
        return None if fails else output.square().mean()

    with pytest.raises(TypeError, match="the result of loss_fn") if fails else nullcontext():
        warmup_allocator(model, 16, example_batch=torch.zeros(2, 16).long(), optimizer=optimizer, loss_fn=loss)
    after = model.state_dict()
    assert all(after[name].equal(tensor) for name, tensor in before.items())


class Unrestorable(nn.Module):
    """The elements of a buffer lie on each other, so nothing can be copied into it."""

    def __init__(self):
        super().__init__()
        self.norm, self.later = nn.BatchNorm1d(4), nn.ParameterList([torch.ones(4)])
        base = torch.ones(1)
        self.change = lambda: base.add_(1)
        self.register_buffer("held", base.expand(3))
        self.register_buffer("counter", torch.zeros(()))

    def forward(self, x):
        self.change()
        self.counter.add_(1)
        return self.norm(x) * self.later[0][:, None]


def test_everything_is_restored_but_what_cannot_be():
    model = nn.Sequential(Unrestorable())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.endswith("held")}
    with pytest.raises(RuntimeError, match=r"could not restore 0\.held: .*single memory location.* Load it again"):
        warmup_allocator(model, 4, example_batch=torch.randn(3, 4, 5), optimizer=optimizer)
    after = model.state_dict()
    assert all(after[name].equal(tensor) for name, tensor in before.items())
    assert not optimizer.state


def test_all_names_are_told_and_attributes_have_none():
    model = nn.Sequential(Unrestorable(), Unrestorable())
    model[0].attribute = torch.ones(1).expand(2)

    def change_all():
        with restore_afterwards(model):
            for tensor in (model[0].held, model[1].held, model[0].attribute):
                tensor.as_strided((1,), (1,)).add_(1)

    names = r"0\.held, 1\.held, a tensor in an attribute or of the optimizer: "
    with pytest.raises(RuntimeError, match=f"could not restore {names}"):
        change_all()


def test_shapes_of_tensors_on_a_gpu(monkeypatch):
    """The buffers copy into tensors of the shape that they had."""
    monkeypatch.setattr(snapshot, "_is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(snapshot, "PinnedBuffers", Copies)
    tensors = [torch.ones(2, 3), torch.ones(4), torch.ones(5)]
    values = snapshot._Values(tensors, {id(tensors[1]): "second"})
    tensors[0].resize_(50).zero_()
    tensors[2].zero_()
    monkeypatch.setattr(Place, "restore", refusing(tensors[1]))
    with pytest.raises(RuntimeError, match="could not restore second: no memory"):
        values.restore()
    assert tensors[0].equal(torch.ones(2, 3))
    assert tensors[2].equal(torch.ones(5))


class Copies:
    """Stands in for the buffers, and takes only pairs of one shape."""

    def save(self, pairs):
        for tensor, copied in pairs:
            copied.copy_(tensor)

    def restore(self, pairs):
        for tensor, copied in pairs:
            assert tensor.shape == copied.shape
            tensor.copy_(copied)


def refusing(refused):
    real = Place.restore

    def restore(self):
        if self.tensor is refused:
            raise RuntimeError("no memory")
        real(self)

    return restore
