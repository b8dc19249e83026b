"""A converted model trains on two ranks as on one: DistributedDataParallel, fully_shard, Accelerate."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi

from ..support.ranks import mean_of_two_ranks
from .zoo import VOCABULARY, make

STEPS, ROWS, LENGTH = 4, 4, 24


def train(model, call, share):
    """Return the losses of a training run with a schedule. `call` is the wrapped model."""
    schedule = SequenceLengthScheduler(8, LENGTH, duration=3, step_size=8)
    schedule.attach(call)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        ids = share(torch.randint(3, VOCABULARY, (ROWS, LENGTH)))
        loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses)


def converted(name):
    torch.manual_seed(0)
    model = make(name).train()
    apply_alibi(model, LENGTH, learn_slopes=True)
    torch.manual_seed(1)
    return model


def wrapped(model, wrapping):
    if wrapping == "ddp":
        return DistributedDataParallel(model)
    if wrapping == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    for module in model.modules():
        if type(module).__name__.endswith(("Block", "DecoderLayer")):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train_one_of_two(rank, name, wrapping):
    model = converted(name)
    return train(model, wrapped(model, wrapping), lambda ids: ids.chunk(2)[rank])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "wrapping"), [("gpt2", "ddp"), ("gpt2", "fsdp"), ("llama", "fsdp")])
def test_two_ranks_train_as_one(name, wrapping):
    together = mean_of_two_ranks(train_one_of_two, name, wrapping)
    model = converted(name)
    torch.testing.assert_close(together, train(model, model, lambda ids: ids), rtol=1e-5, atol=1e-6)


def test_accelerate_trains_as_without():
    pytest.importorskip("accelerate")
    model = converted("gpt2")
    losses = train(model, wrapped(model, "accelerate"), lambda ids: ids)
    model = converted("gpt2")
    assert losses.equal(train(model, model, lambda ids: ids))
