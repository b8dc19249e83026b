"""warmup_allocator on two ranks: state is restored, and both ranks take the same decision."""

import pytest
import torch

from seqwarm_kernels.allocator.distributed import RankConsensus

from ..support.ranks import run_ranks
from .ranks import everything_on_a_rank, one_rank_fails_inside_fully_shard


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind):
    run_ranks(everything_on_a_rank, kind)


@pytest.mark.slow
def test_one_rank_fails_inside_fully_shard():
    run_ranks(one_rank_fails_inside_fully_shard)


def test_without_other_ranks_the_own_number_counts():
    alone = RankConsensus(None, torch.device("cpu"))
    assert alone.smallest(3) == alone.largest(3) == 3
