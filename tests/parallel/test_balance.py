"""The order of slopes that balances ranks, and the work of ranks."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import alibi_slopes
from seqwarm_kernels.parallel import balanced_slopes, rank_work

SIZES = st.builds(lambda ranks, turns: (ranks * turns, ranks), st.integers(1, 16), st.integers(1, 8))


@given(SIZES)
def test_the_slopes_are_those_of_alibi_in_snake_order(size):
    heads, ranks = size
    slopes = balanced_slopes(heads, ranks)
    assert slopes.dtype == torch.float32
    ordered = sorted(alibi_slopes(heads).tolist(), reverse=True)
    snake = itertools.cycle([*range(ranks), *reversed(range(ranks))])
    of_ranks = [[] for _ in range(ranks)]
    for slope in ordered:
        of_ranks[next(snake)].append(slope)
    assert slopes.tolist() == [slope for of_rank in of_ranks for slope in of_rank]


def test_the_work_of_ranks():
    share = torch.tensor([[0.1, 0.3, 0.4, 0.6], [0.3, 0.5, 0.8, 1.0]])
    work = rank_work(share, 2)
    assert work.shares == pytest.approx((0.3, 0.7))
    assert work.mean() == pytest.approx(0.5)
    assert work.imbalance() == pytest.approx(1.4)
    assert rank_work(share[0], 4).shares == pytest.approx((0.1, 0.3, 0.4, 0.6))
    assert work.table().splitlines()[1:] == [
        "   0                  30.0%                  0.60",
        "   1                  70.0%                  1.40",
        " all                  50.0%          largest 1.40",
    ]
    idle = rank_work(torch.zeros(4), 2)
    assert idle.imbalance() == 1
    assert "largest 1.00" in idle.table()
