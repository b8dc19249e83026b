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
