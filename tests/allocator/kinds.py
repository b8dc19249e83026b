"""Kinds of state that a training changes: models, optimizers, and values that modules hold."""

import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

WORDS, WIDTH, MAX_LEN = 13, 8, 16


class Body(nn.Module):
    """An embedding, the modules under test, and a head."""

    def __init__(self, *inner):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.inner = nn.Sequential(*inner)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids):
        return self.head(self.inner(self.embedding(input_ids)))


class ChannelNorm(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Buffers(nn.Module):
    """A counter, a buffer that is not saved, a buffer created in each call, and None."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        self.calls += 1
        self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
        self.register_buffer("made", torch.ones(x.shape[1]))
        return x


class Draws(nn.Module):
    """Draws random numbers of Python and NumPy."""

    def forward(self, x):
        return x * (random.random() + numpy.random.rand())


def tied():
    model = Body(nn.Identity())
    model.head.weight = model.embedding.weight
    return model


def frozen():
    """In part, also to evaluation mode."""
    model = Body(nn.Linear(WIDTH, WIDTH).requires_grad_(False), nn.Dropout(0.5).eval())
    model.embedding.requires_grad_(False)
    return model


def compiled():
    model = Body(nn.Linear(WIDTH, WIDTH), nn.GELU())
    model.compile(backend="eager")
    return model


def sharded(has_inner=True):
    model = Body(nn.Linear(WIDTH, WIDTH), nn.GELU())
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    if has_inner:
        fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


MODELS = {
    "random numbers": lambda: Body(nn.Dropout(0.5), nn.RReLU(), Draws()),
    "tied weights": tied,
    "frozen parts": frozen,
    "buffers": lambda: Body(Buffers()),
    "compiled": compiled,
    "DistributedDataParallel": lambda: DistributedDataParallel(Body(ChannelNorm(WIDTH), nn.Dropout(0.2))),
    "fully_shard": sharded,
    "fully_shard of the whole": lambda: sharded(has_inner=False),
}


class Inside(torch.optim.Optimizer):
    """Steps an optimizer that it holds, as in SAM, and others in a list. Shares its groups with the first."""

    def __init__(self, parameters, **options):
        first, *others = parameters
        super().__init__([first], {})
        self.base_optimizer = torch.optim.AdamW(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups
        self.others = [torch.optim.AdamW([each], **options) for each in others]

    def step(self, closure=None):
        for optimizer in (self.base_optimizer, *self.others):
            optimizer.step()


#: Their classes and options.
OPTIMIZERS = {
    "fused AdamW with a tensor rate": (torch.optim.AdamW, {"lr": torch.tensor(0.1), "fused": True}),
    "SGD with momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "optimizers inside": (Inside, {"lr": 0.1}),
}

#: A model and the optimizer that trains it.
TRAININGS = {name: (make, torch.optim.AdamW, {"lr": 0.05}) for name, make in MODELS.items()}
TRAININGS |= {name: (MODELS["random numbers"], *optimizer) for name, optimizer in OPTIMIZERS.items()}


def flip(tensor):
    """Flip all bits of its memory."""
    storage = (tensor.values() if tensor.is_nested else tensor).untyped_storage()
    torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_not_()


def shrink(tensor):
    tensor.resize_(1)
    tensor.untyped_storage().resize_(4)


#: Each with a value that a sum, a comparison of numbers or a change of dtype would miss.
TENSORS = {
    "zeros with signs": lambda: torch.tensor([0.0, -0.0, 1.5]),
    "every other": lambda: torch.randn(5)[::2],
    "overlapping": lambda: torch.arange(5.0).unfold(0, 3, 1),
    "conjugated": lambda: torch.randn(4, dtype=torch.complex64).conj(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged),
}

#: How (2, 2) numbers are laid elsewhere, as by `param.data = momentum * param.data + ...` in the forward of a teacher.
RELAID = {
    "other memory": lambda tensor: setattr(tensor, "data", torch.full((2, 2), 9.0)),
    "other dtype": lambda tensor: setattr(tensor, "data", tensor.data.view(torch.int32)),
    "longer": lambda tensor: tensor.resize_(1000).fill_(9),
    "shorter in less memory": shrink,
    "freed": lambda tensor: tensor.untyped_storage().resize_(0),
    "transposed": lambda tensor: tensor.t_().mul_(2),
}

OTHERS = {
    "list": (lambda: [1, 2], lambda value: value.append(3)),
    "tensors in a tuple": (lambda: (torch.ones(2),), lambda value: value[0].zero_()),
    "entries of a dict": (
        lambda: {"seen": [1], "sum": torch.zeros(2)},
        lambda value: (value["seen"].append(3), value["sum"].add_(1)),
    ),
    "OrderedDict": (lambda: OrderedDict(a=1, b=2), lambda value: value.move_to_end("a")),
    "defaultdict": (lambda: defaultdict(int), lambda value: value["new"]),
    "set": (lambda: {1}, lambda value: value.add(2)),
    "Counter": (lambda: Counter("aab"), lambda value: value.update("a")),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda value: value.append(3)),
    "array": (lambda: numpy.ones(3), lambda value: value.fill(2)),
    "torch.Generator": (
        lambda: torch.Generator().manual_seed(5),
        lambda value: torch.rand(3, generator=value),
    ),
    "numpy Generator": (lambda: numpy.random.default_rng(5), lambda value: value.random()),
    "numpy RandomState": (lambda: numpy.random.RandomState(5), lambda value: value.rand()),
    "random.Random": (lambda: random.Random(5), lambda value: value.random()),
}

#: Values that a module may hold, and how a forward changes each.
VALUES = {name: (make, flip) for name, make in TENSORS.items()}
VALUES |= {name: (lambda: torch.arange(4.0).view(2, 2), change) for name, change in RELAID.items()}
VALUES |= OTHERS
