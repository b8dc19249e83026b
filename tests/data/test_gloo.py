"""Real ranks on uneven data end together, and their sums are those of one process."""

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, LengthBatchStream, PaddedCollator
from seqwarm_kernels.data.sources.sequence_source import SequenceSource

from ..support.ranks import join_group, leave_group, run_ranks

WORDS, WIDTH = 11, 4
#: A few very long items among many short ones: half of the items are far from half of the batches.
LENGTHS = np.where(np.arange(131) % 13 == 0, 60, 3 + np.arange(131) % 7)


def make_items():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(WORDS, (int(length),), generator=generator) for length in LENGTHS]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS))


def summed_loss(model, batch):
    logits = model(batch["input_ids"][:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")


def evaluate(sampler, items, model):
    """[loss, tokens, rows, steps] summed over the batches of this rank."""
    sums = torch.zeros(4, dtype=torch.float64)
    for indices in sampler:
        batch = PaddedCollator()([items[index] for index in indices])
        with torch.no_grad():
            loss = summed_loss(model, batch)
        sums += torch.tensor([loss, (batch["labels"][:, 1:] != -100).sum(), len(indices), 1])
        if distributed.is_initialized():
            distributed.barrier()  # with fewer steps on one rank, the others would wait for ever
    return sums


def train(sampler, items, model):
    """Number of steps. Each step waits for all ranks."""
    optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.1), 0
    for indices in sampler:
        loss = summed_loss(model, PaddedCollator()([items[index] for index in indices]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
    return steps


def one_rank(rank, port, world_size, results):
    torch.set_num_threads(1)
    join_group(rank, port, world_size)
    items, model = make_items(), make_model()
    planner = BatchPlanner(128, multiple_of=4)
    sums = evaluate(LengthBatchSampler(LENGTHS, planner, window=40, remainder="empty"), items, model)
    steps = [train(LengthBatchSampler(LENGTHS, planner, window=40), items, DistributedDataParallel(model))]
    for remainder in ("repeat", "drop"):
        stream = LengthBatchStream(
            SequenceSource(list(range(131))), planner, length=LENGTHS.__getitem__, window=40, remainder=remainder
        )
        steps.append(train(stream, items, DistributedDataParallel(model)))
    results[rank] = torch.tensor([*sums, *steps], dtype=torch.float64)
    leave_group()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_end_together(world_size):
    results = torch.zeros(world_size, 7, dtype=torch.float64).share_memory_()
    run_ranks(one_rank, world_size, results, world_size=world_size)
    alone = LengthBatchSampler(LENGTHS, BatchPlanner(128, multiple_of=4), window=40)
    expected = evaluate(alone, make_items(), make_model())
    batches = int(expected[3])
    torch.testing.assert_close(results[:, :3].sum(dim=0), expected[:3])
    assert results[:, 3].tolist() == [-(-batches // world_size)] * world_size
    assert results[:, 4].tolist() == [batches // world_size] * world_size
    assert len(set(results[:, 5].tolist())) == len(set(results[:, 6].tolist())) == 1
    assert (results[:, 5] - results[:, 6]).abs().max() <= 1
