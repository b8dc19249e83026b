"""A converted model trains on two ranks as on one: DistributedDataParallel and fully_shard."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import seqwarm_kernels.models.seqwarm  # noqa: F401
from seqwarm_kernels import SequenceLengthScheduler, apply_alibi
from seqwarm_kernels.models.alibi_layer import observe_calls

from ..support.ranks import mean_of_two_ranks
from .zoo import VOCABULARY, converted, heads_of, make, slopes_of

STEPS, ROWS, LENGTH = 4, 4, 24
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def train(model, call, share, mode="truncate"):
    """Return the losses of a training run with a schedule. `call` is the wrapped model."""
    schedule = SequenceLengthScheduler(8, LENGTH, duration=3, step_size=8)
    schedule.attach(call, mode=mode)
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


def trainable(name):
    """A converted model, or "name-attention": one with this attention."""
    name, _, attention = name.partition("-")
    model = make(name, attention=attention) if attention else converted(name, max_seq_length=LENGTH, learn_slopes=True)
    model.train()
    torch.manual_seed(1)
    return model


def wrapped(model, wrapping):
    if wrapping == "ddp":
        return DistributedDataParallel(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    shard_slopes(model, mesh)
    for module in model.modules():
        if type(module).__name__.endswith(("Block", "DecoderLayer")):
            fully_shard(module, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shard_slopes(model, mesh):
    for heads in heads_of(model):
        fully_shard(heads, mesh=mesh)


def train_one_of_two(rank, name, wrapping, mode):
    model = trainable(name)
    return train(model, wrapped(model, wrapping), lambda ids: ids.chunk(2)[rank], mode)


@pytest.mark.parametrize(
    ("name", "wrapping", "mode"),
    [
        ("llama-seqwarm", "ddp", "segments"),
        pytest.param("gpt2", "fsdp", "truncate", marks=pytest.mark.slow),
        pytest.param("llama-sdpa", "fsdp", "segments", marks=pytest.mark.slow),
    ],
)
def test_two_ranks_train_as_one(name, wrapping, mode):
    together = mean_of_two_ranks(train_one_of_two, name, wrapping, mode)
    model = trainable(name)
    torch.testing.assert_close(together, train(model, model, lambda ids: ids, mode), rtol=1e-5, atol=1e-6)


def test_multihead_attention_that_is_sharded_itself(mesh):
    """The hooks of fully_shard pass views of its arguments, which were taken for cross-attention."""
    x, layer = torch.randn(2, 9, 16), nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.0)
    apply_alibi(layer, 64)
    expected = layer(x).detach()
    fully_shard(layer.self_attn, mesh=mesh)
    calls = []
    with observe_calls(calls.append):
        torch.testing.assert_close(fully_shard(layer, mesh=mesh)(x), expected)
    assert len(calls) == 1


def slopes_after_a_step(model):
    """The dtypes of the slopes that attention used, and the learned slopes."""
    calls, ids = [], torch.randint(3, VOCABULARY, (2, LENGTH))
    with observe_calls(calls.append):
        model(input_ids=ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    return {call.slopes.dtype for call in calls}, torch.tensor(slopes_of(model))


def test_a_policy_that_rounds_learned_slopes_warns(mesh):
    model = fully_shard(trainable("gpt2"), mesh=mesh, mp_policy=BFLOAT16)
    with pytest.warns(UserWarning, match="slopes are rounded"):
        assert slopes_after_a_step(model)[0] == {torch.bfloat16}


@pytest.mark.filterwarnings("error")
def test_slopes_that_are_sharded_first_stay_float32(mesh):
    model = trainable("gpt2").bfloat16()
    before = torch.tensor(slopes_of(model))
    shard_slopes(model, mesh)
    dtypes, after = slopes_after_a_step(fully_shard(model, mesh=mesh, mp_policy=BFLOAT16))
    assert dtypes == {torch.float32}
    assert (before != after).all()
