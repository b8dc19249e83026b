"""warmup_allocator on two ranks: state is restored, and both ranks take the same decision."""

import pytest

from ..support.ranks import run_ranks
from .ranks import everything_on_a_rank


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks(kind):
    run_ranks(everything_on_a_rank, kind)
