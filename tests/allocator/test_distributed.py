"""warmup_allocator on two ranks: state is restored, and both ranks take the same decision."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from seqwarm_kernels import warmup_allocator
from seqwarm_kernels.allocator.distributed import RankConsensus, reshard

from ..support.ranks import run_ranks
from .ranks import everything_on_a_rank, one_rank_fails_inside_fully_shard


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind):
    run_ranks(everything_on_a_rank, kind)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("forward", KeyError("a bug"), "a bug"),
        ("backward", KeyError("a bug"), "a bug"),
        ("backward", torch.OutOfMemoryError("CUDA out of memory."), "failed on another rank; here batch size 1 at"),
    ],
)
def test_one_rank_fails_inside_fully_shard(where, error, message):
    run_ranks(one_rank_fails_inside_fully_shard, where, error, message)


def test_an_engine_of_deepspeed_is_refused():
    """Its hooks keep gradients."""
    engine = type("DeepSpeedEngine", (nn.Linear,), {})(4, 4)
    with pytest.raises(ValueError, match="model must not be DeepSpeed's yet, got DeepSpeedEngine"):
        warmup_allocator(engine, 4, example_batch=torch.ones(1, 4, 4))


@pytest.fixture
def one_rank():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    gc.collect()  # a model that outlives its process group would abort the process
    torch.distributed.destroy_process_group()


def sharded(has_inner=True):
    torch.manual_seed(0)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    inner = nn.Linear(4, 4)
    model = nn.Sequential(fully_shard(inner, mesh=mesh) if has_inner else inner, nn.Linear(4, 4))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters())


def test_the_state_of_a_sharded_model_can_be_saved_afterwards(one_rank):
    """fully_shard adds its hooks of state dicts in the first forward alone."""
    model, optimizer = sharded()
    warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 4), optimizer=optimizer)
    model(torch.ones(1, 4, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 4, 4))  # leaves parameters that are not sharded
    weights, state = get_state_dict(model, optimizer)
    assert state["state"].keys() == weights.keys()


def test_parameters_that_a_forward_has_left_unsharded(one_rank):
    model, _ = sharded()
    model.set_reshard_after_forward(False)
    with torch.no_grad():
        model(torch.ones(1, 4, 4))
    assert not isinstance(model[0].weight, torch.distributed.tensor.DTensor)
    reshard(model)
    assert all(isinstance(each, torch.distributed.tensor.DTensor) for each in model.parameters())


def test_without_other_ranks_the_own_number_counts():
    alone = RankConsensus(None, torch.device("cpu"))
    assert alone.smallest(3) == alone.largest(3) == 3


class OutOfMemory(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("has_inner", [True, False])
def test_a_sharded_model_trains_after_a_backward_that_was_out_of_memory(one_rank, has_inner):
    """fully_shard would take the next backward for a part of the interrupted one."""
    gradients = []
    for is_warmed in (False, True):
        model, _ = sharded(has_inner)
        if is_warmed:
            model[0].register_forward_hook(lambda *arguments: OutOfMemory.apply(arguments[-1]))
            report = warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 4))
            assert report.out_of_memory.length == 4
            model[0]._forward_hooks.popitem()
        model(torch.ones(1, 4, 4)).sum().backward()
        gradients.append([parameter.grad.full_tensor() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients)
