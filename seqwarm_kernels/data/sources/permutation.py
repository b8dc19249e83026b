"""Random permutations, whole or in parts. They do not depend on the machine or the version of NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_FEW = 64  #: a network of so few numbers does not make all orders equally likely
_MULTIPLIERS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)  # of MurmurHash3's last step


def permutation(n: int, *seeds: int) -> NDArray[np.int64]:
    """Return the random permutation of range(n) that `seeds` define. That of `permuted` is another one.

    The time is that of all n values, which then take a fraction of the time of `permuted`.
    """
    # NumPy has frozen RandomState's streams, so a state stays valid after an upgrade of NumPy.
    return np.random.RandomState(np.random.MT19937(np.random.SeedSequence(seeds))).permutation(n)


def permuted(indices: NDArray[np.int64], n: int, *seeds: int) -> NDArray[np.int64]:
    """Return the values at `indices`, each in [0, n), of the random permutation of range(n) that `seeds` define.

    Time and memory grow with `indices` only, not with n. A Feistel network permutes the numbers of an even count of
    bits, which are not many more than n. A number that the network maps to n or above is mapped again until the result
    is below n. This makes the mapping a permutation of range(n).
    """
    if n <= _FEW:
        return permutation(n, *seeds)[indices]
    keys = np.random.SeedSequence(seeds).generate_state(_ROUNDS, np.uint64)
    half = np.uint64(((n - 1).bit_length() + 1) // 2)
    mask = (np.uint64(1) << half) - np.uint64(1)
    values = np.array(indices, dtype=np.uint64)
    outside = np.arange(len(values))
    while len(outside):
        mapped = values[outside]
        left, right = mapped >> half, mapped & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        values[outside] = mapped = left << half | right
        outside = outside[mapped >= n]
    return values.astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> np.uint64(33))) * multiplier
    return values ^ (values >> np.uint64(33))
