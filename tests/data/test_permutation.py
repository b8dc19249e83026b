from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.data.sources.permutation import permutation, permuted

from ..support.tiers import first_fast


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40))
def test_the_order_is_a_permutation_that_can_be_evaluated_in_parts(n, seed, epoch):
    whole = permuted(np.arange(n), n, seed, epoch)
    assert sorted(whole.tolist()) == list(range(n))
    indices = np.array([0, n // 2, n - 1])
    assert permuted(indices, n, seed, epoch).tolist() == whole[indices].tolist()


def test_the_order_does_not_change():
    """Recorded values: a state from another machine must refer to the same items."""
    assert permuted(np.arange(10), 10, 1, 2).tolist() == [4, 3, 1, 2, 7, 6, 5, 8, 0, 9]
    assert permuted(np.arange(3), 10**12, 1, 2).tolist() == [453725367779, 15928917536, 338310848791]
    assert permutation(10, 1, 2).tolist() == [1, 6, 4, 8, 3, 7, 5, 0, 2, 9]


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40))
def test_the_whole_order_is_a_permutation_of_its_seeds(n, seed, epoch):
    whole = permutation(n, seed, epoch)
    assert sorted(whole.tolist()) == list(range(n))
    assert whole.tolist() == permutation(n, seed, epoch).tolist()


@pytest.mark.parametrize("n", first_fast([3, 2, 4, 5]))
def test_all_orders_are_equally_likely(n):
    orders = Counter(tuple(permuted(np.arange(n), n, seed, 0).tolist()) for seed in range(400))
    count = np.prod(range(1, n + 1))
    expected = 400 / count
    chi_squared = sum((seen - expected) ** 2 / expected for seen in orders.values())
    chi_squared += expected * (count - len(orders))
    assert chi_squared < count - 1 + 5 * np.sqrt(2 * count)  # mean count - 1, variance twice that
