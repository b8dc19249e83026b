"""warmup_allocator on two ranks: state is restored, and both ranks take the same decision."""

import pytest
import torch

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
