from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.data.sources.permutation import shuffled


@given(n=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40))
def test_an_order_is_a_permutation_known_in_parts(n, seed, epoch):
    whole = shuffled(np.arange(n), n, seed, epoch)
    assert sorted(whole.tolist()) == list(range(n))
    places = np.array([0, n // 2, n - 1])
    assert shuffled(places, n, seed, epoch).tolist() == whole[places].tolist()


def test_an_order_stays_the_same():
    """Computed once and written down: a state from another machine must mean the same items."""
    assert shuffled(np.arange(10), 10, 1, 2).tolist() == [4, 3, 1, 2, 7, 6, 5, 8, 0, 9]
    assert shuffled(np.arange(3), 10**12, 1, 2).tolist() == [453725367779, 15928917536, 338310848791]


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_orders_are_equally_likely(n):
    orders = Counter(tuple(shuffled(np.arange(n), n, seed, 0).tolist()) for seed in range(1200))
    count = np.prod(range(1, n + 1))
    expected = 1200 / count
    surprise = sum((times - expected) ** 2 / expected for times in orders.values())
    surprise += expected * (count - len(orders))
    assert surprise < count - 1 + 5 * np.sqrt(2 * count)  # chi squared: mean count - 1, variance twice that
