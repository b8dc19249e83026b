"""warmup_allocator on two ranks: state is restored, and both ranks take the same decision."""

import gc

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from seqwarm_kernels import warmup_allocator

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


def test_the_state_of_a_sharded_model_can_be_saved_afterwards():
    """fully_shard adds its hooks of state dicts in the first forward alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
        model = fully_shard(nn.Sequential(fully_shard(nn.Linear(4, 4), mesh=mesh), nn.Linear(4, 4)), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        warmup_allocator(model, 4, example_batch=torch.ones(1, 4, 4), optimizer=optimizer)
        model(torch.ones(1, 4, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(1, 4, 4))  # leaves parameters that are not sharded
        weights, state = get_state_dict(model, optimizer)
        assert state["state"].keys() == weights.keys()
        del model, optimizer
    finally:
        gc.collect()  # a model that outlives its process group would abort the process
        torch.distributed.destroy_process_group()
