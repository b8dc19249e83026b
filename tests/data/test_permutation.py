import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.data.sources.permutation import permutation, permuted

from ..support.tiers import examples

seeds = st.integers(0, 2**40)


@examples(40)
@given(n=st.integers(1, 3000), seed=seeds, epoch=seeds)
def test_orders_are_permutations_and_one_can_be_evaluated_in_parts(n, seed, epoch):
    whole = permuted(np.arange(n), n, seed, epoch)
    assert sorted(whole.tolist()) == sorted(permutation(n, seed, epoch).tolist()) == list(range(n))
    indices = np.array([0, n // 2, n - 1])
    assert permuted(indices, n, seed, epoch).tolist() == whole[indices].tolist()


def test_the_order_does_not_change():
    """Recorded values: a state from another machine must refer to the same items."""
    assert permuted(np.arange(10), 10, 1, 2).tolist() == [1, 6, 4, 8, 3, 7, 5, 0, 2, 9]
    assert permuted(np.arange(5), 100, 1, 2).tolist() == [55, 79, 10, 21, 61]
    assert permuted(np.arange(3), 10**12, 1, 2).tolist() == [453725367779, 15928917536, 338310848791]
    assert permutation(10, 1, 2).tolist() == [1, 6, 4, 8, 3, 7, 5, 0, 2, 9]


@pytest.mark.parametrize("n", [5, 65])
def test_every_item_is_equally_likely_in_every_place(n):
    orders = np.array([permuted(np.arange(n), n, seed, 0) for seed in range(200)])
    for place in (0, n // 2, n - 1):
        counts = np.bincount(orders[:, place], minlength=n)
        chi_squared = ((counts - 200 / n) ** 2).sum() * n / 200
        assert chi_squared < n - 1 + 5 * np.sqrt(2 * n)  # mean n - 1, variance twice that
