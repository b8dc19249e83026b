from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.data import BatchPlanner, LengthBatchStream, SequenceSource
from seqwarm_kernels.data.sources import permutation as module
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


def mapped_by_ints(number, keys):
    """The network on a number of six bits."""
    left, right = divmod(number, 8)
    for key in keys:
        mixed = (right + key) % 2**64
        for multiplier in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
            mixed = (mixed ^ mixed >> 33) * multiplier % 2**64
        left, right = right, left ^ (mixed ^ mixed >> 33) % 8
    return 8 * left + right


@given(n=st.integers(1, 64), seed=st.integers(0, 2**40), epoch=st.integers(0, 2**40))
def test_orders_of_few_items(n, seed, epoch):
    """They are looked up, and are those of the network: a state must refer to the same items."""
    keys = np.random.SeedSequence((seed, epoch)).generate_state(8, np.uint64).tolist()
    expected = []
    for number in range(n):
        value = mapped_by_ints(number, keys)
        while value >= n:
            value = mapped_by_ints(value, keys)
        expected.append(value)
    found = permuted(np.arange(n), n, seed, epoch)
    assert found.tolist() == expected
    assert found.dtype == np.int64


@pytest.mark.parametrize("n", [1, 2, 5])
def test_a_window_of_many_epochs_of_few_items(n, monkeypatch):
    """Each epoch took the network's eight rounds up to 64 times, and a window of 10,000 items half a minute."""
    calls, mixed = [], module._mixed
    monkeypatch.setattr(module, "_mixed", lambda values: [calls.append(1), mixed(values)][1])
    stream = LengthBatchStream(SequenceSource([[7]] * n, infinite=True), BatchPlanner(100, packed=True), window=100)
    assert len(next(iter(stream))) == 100
    assert len(calls) <= -(-100 // n) + 1


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
