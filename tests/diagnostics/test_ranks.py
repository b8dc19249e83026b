"""Sharded states on two ranks give the same statistics as the whole model in one process."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from seqwarm_kernels.diagnostics import TrainingMonitor, moment_statistics

from ..support.ranks import mean_of_two_ranks
from .plain import model_of, statistics_of, train_step


def values(found):
    return torch.stack([value.double() for value in found])


def train_sharded(rank, mesh_shape):
    """FSDP on one mesh dimension, or replicas on one and shards on the other; 7 and 3 rows are sharded unevenly."""
    names = ("replicate", "shard")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    model = model_of()
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    records = []
    with TrainingMonitor(optimizer, *([records.append] if rank == 0 else []), read_every=2) as monitor:
        for index in range(3):
            torch.manual_seed(index)
            loss = train_step(model, optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
            assert isinstance(norm, DTensor)
            monitor.observe(loss, norm if index else None)
        assert isinstance(next(iter(optimizer.state.values()))["exp_avg"], DTensor)
    assert len(records) == (3 if rank == 0 else 0)
    assert monitor.steps == 3
    found = values(moment_statistics(optimizer))
    if rank == 0:
        last = records[-1]
        assert last.grad_norm == pytest.approx(found[4].item(), rel=1e-6)
        assert [last.variance_l1, last.variance_max, last.momentum_l1, last.momentum_max] == found[:4].tolist()
    return found


def whole():
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters())
    for index in range(3):
        torch.manual_seed(index)
        train_step(model, optimizer)
    return statistics_of(optimizer)


def by_hand(rank):
    """Sharded, replicated and plain moments in one optimizer; only rank 1 has the largest element."""
    mesh = init_device_mesh("cpu", (2,))
    parameters = [torch.nn.Parameter(torch.zeros(6)) for _ in range(3)]
    optimizer = torch.optim.Adam(parameters)
    sharded = torch.tensor([1.0, 1.0] if rank == 0 else [1.0, -5.0])
    replicated = torch.tensor([2.0, 2.0])
    moments = [
        DTensor.from_local(sharded, mesh, [Shard(0)]),
        DTensor.from_local(replicated, mesh, [Replicate()]),
        torch.tensor([4.0]),
    ]
    for parameter, moment in zip(parameters, moments, strict=True):
        optimizer.state[parameter] = {"exp_avg": moment, "exp_avg_sq": moment * moment}
    found = values([*moment_statistics(optimizer)[:4], torch.zeros(())])
    optimizer.state[parameters[0]]["exp_avg"] = DTensor.from_local(replicated, mesh, [Partial()])
    with pytest.raises(ValueError, match=r"must be sharded or replicated, got \(Partial"):
        moment_statistics(optimizer)
    return found


def monitor_of_flat_parameters():
    """Without a step: only the warning of a monitor is tested."""
    for keeps_parameters in (False, True):
        model = FullyShardedDataParallel(model_of(), use_orig_params=keeps_parameters, device_id=torch.device("cpu"))
        with pytest.warns(UserWarning, match="this rank's part of parameters that FullyShardedDataParallel shards"):
            TrainingMonitor(torch.optim.AdamW(model.parameters()))


MESHES = [(2,), (1, 2), (2, 1)]


def all_cases(rank):
    monitor_of_flat_parameters()
    return torch.stack([*(train_sharded(rank, shape) for shape in MESHES), by_hand(rank)])


@pytest.fixture(scope="module")
def found():
    """The results of all cases, from two processes that are started once."""
    return mean_of_two_ranks(all_cases).tolist()


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_fully_shard(found, mesh_shape):
    assert found[MESHES.index(mesh_shape)] == pytest.approx(whole(), rel=1e-5)


def test_sharded_replicated_and_plain_elements_count_once(found):
    assert found[-1] == pytest.approx([16, 5, 16, 5, 0])
