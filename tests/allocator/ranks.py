"""One of two ranks that call warmup_allocator together."""

import faulthandler
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator import warmup
from seqwarm_kernels.allocator.distributed import is_sharded, rank_consensus

from ..support.ranks import join_group, leave_group
from ..support.same import assert_same
from .kinds import MAX_LEN, WIDTH, WORDS, Body, ChannelNorm
from .test_state import OUT_OF_MEMORY, fails_at, loss_fn, train
from .traces import everything, identities


class Model(Body):
    """Raises an error from a given number of rows on."""

    def __init__(self):
        super().__init__(nn.Linear(WIDTH, WIDTH), ChannelNorm(WIDTH), nn.Dropout(0.2))
        self.raises = {}

    def forward(self, input_ids):
        hidden = self.inner(self.embedding(input_ids))
        if input_ids.shape[0] >= self.raises.get("rows", 1000):
            raise self.raises["error"]
        return self.head(hidden)


def wrapped(kind):
    torch.manual_seed(0)
    model = Model()
    if kind == "ddp":
        return DistributedDataParallel(model, gradient_as_bucket_view=True), model
    fully_shard(model.inner)
    return fully_shard(model), model


def state_is_restored(kind):
    results = []
    for warmed in (False, True):
        model, _ = wrapped(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        torch.manual_seed(torch.distributed.get_rank())
        train(model, optimizer, 2)
        if warmed:
            before, before_ids = everything(model, optimizer), identities(model, optimizer)
            scheduler = SequenceLengthScheduler(4, MAX_LEN, duration=10, step_size=4)
            report = warmup_allocator(
                model, MAX_LEN, batch_size=3, loss_fn=loss_fn, optimizer=optimizer, scheduler=scheduler,
                accumulation_steps=2,
            )  # fmt: skip
            assert report.lengths == (16, 4, 8, 12)
            assert_same(before, everything(model, optimizer))
            assert before_ids == identities(model, optimizer)
        train(model, optimizer, 3)
        results.append(everything(model, optimizer))
    assert_same(*results)


def inner_optimizer_is_restored():
    """ZeroRedundancyOptimizer keeps this rank's state in an optimizer inside."""
    for steps in (0, 2):
        model = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        for _ in range(steps):
            model(torch.ones(1, 2, dtype=torch.long)).sum().backward()
            optimizer.step()
        before = everything(model, optimizer.optim)
        warmup_allocator(model, MAX_LEN, optimizer=optimizer)
        assert_same(before, everything(model, optimizer.optim))


def one_rank_out_of_memory(kind):
    """Both ranks reduce the batch size. Under fully_shard ranks wait for each other inside a pass: both fail here,
    as they do in training, since shards have the same size."""
    model, inner = wrapped(kind)
    if kind == "fsdp" or torch.distributed.get_rank() == 1:
        inner.raises = {"rows": 6, "error": torch.OutOfMemoryError("CUDA out of memory.")}
    before = everything(model)
    report = warmup_allocator(model, MAX_LEN, batch_size=20, loss_fn=loss_fn, find_batch_size=True)
    assert report.out_of_memory.largest_batch_size == 5
    assert report.lengths == ()
    assert_same(before, everything(model))
    assert warmup_allocator(model, MAX_LEN, batch_size=5, loss_fn=loss_fn).out_of_memory is None
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


def ranks_with_different_batch_sizes(kind):
    """The largest batch size counts."""
    model, _ = wrapped(kind)
    own = {"input_ids": torch.randint(WORDS, (3 + torch.distributed.get_rank(), 6))}
    assert warmup_allocator(model, MAX_LEN, example_batch=own, loss_fn=loss_fn).batch_size == 4


def one_rank_fails():
    model, inner = wrapped("ddp")
    rank = torch.distributed.get_rank()
    if rank == 1:
        inner.raises = {"rows": 1, "error": KeyError("a bug")}
    with pytest.raises(KeyError if rank == 1 else RuntimeError, match="a bug" if rank == 1 else "on another rank"):
        warmup_allocator(model, MAX_LEN, loss_fn=loss_fn)
    inner.raises = {}
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), 2)


def ranks_agree_over_gloo(kind):
    model, _ = wrapped(kind)
    with rank_consensus(model, torch.device("cuda"), are_waiting=is_sharded(model)) as consensus:
        assert torch.distributed.get_backend(consensus.group) == "gloo"
        assert consensus.group not in (getattr(model, "process_group", None), torch.distributed.group.WORLD)
        assert consensus.largest(torch.distributed.get_rank()) == 1
        assert consensus.smallest(torch.distributed.get_rank()) == 0


def one_rank_cannot_copy(kind):
    model, _ = wrapped(kind)
    rank = torch.distributed.get_rank()
    restore = warmup.restored
    if rank == 1:
        warmup.restored = Mock(side_effect=RuntimeError("no pinned memory"))
    gradient = next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
    with pytest.raises(RuntimeError, match="no pinned memory" if rank == 1 else "another rank could not copy"):
        warmup_allocator(model, MAX_LEN, loss_fn=loss_fn)
    warmup.restored = restore
    assert next(model.parameters()).grad is gradient


def some_of_all_ranks():
    """The other rank does not call warmup_allocator."""
    rank = torch.distributed.get_rank()
    groups = [torch.distributed.new_group([each]) for each in range(2)]
    model = DistributedDataParallel(Model(), process_group=groups[rank])
    if rank == 0:
        assert warmup_allocator(model, MAX_LEN, loss_fn=loss_fn).batch_size == 1
    torch.distributed.barrier()


def one_rank_fails_inside_fully_shard(rank, port):
    """The other rank waits in a collective until the timeout of its process group. Both raise an error."""
    faulthandler.dump_traceback_later(60, exit=True)
    join_group(rank, port, timeout=timedelta(seconds=4))
    model, _ = wrapped("fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    if rank == 1:
        fails_at(model, optimizer, "backward", OUT_OF_MEMORY)
    before = everything(model, optimizer)
    message = "failed on another rank; here batch size 1 at" if rank == 1 else "(?i)timed out"
    with pytest.raises(RuntimeError, match=message):
        warmup_allocator(model, MAX_LEN, loss_fn=loss_fn, optimizer=optimizer)
    assert_same(before, everything(model, optimizer))
    torch.distributed.destroy_process_group()


def everything_on_a_rank(rank, port, kind):
    faulthandler.dump_traceback_later(120, exit=True)  # shows where ranks wait for each other
    join_group(rank, port)
    state_is_restored(kind)
    inner_optimizer_is_restored()
    one_rank_out_of_memory(kind)
    ranks_with_different_batch_sizes(kind)
    ranks_agree_over_gloo(kind)
    one_rank_cannot_copy(kind)
    if kind == "ddp":
        some_of_all_ranks()
        one_rank_fails()
    leave_group()
