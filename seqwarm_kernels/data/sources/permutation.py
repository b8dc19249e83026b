"""Random orders of which any part can be had without the rest, the same on every machine and version of NumPy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8
_SMALLEST_HALF = 3  # bits; with 2, orders of five items are not equally likely
_MULTIPLIERS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)  # of MurmurHash3's last step


def shuffled(places: NDArray[np.int64], n: int, *seeds: int) -> NDArray[np.int64]:
    """What stands at `places`, each in [0, n), of range(n) in the random order that `seeds` names.

    Costs time and memory for `places` only. A Feistel network permutes the numbers of an even count of bits, not many
    more than n; one that it sends beyond n is sent on until it lands below, which makes it a permutation of range(n).
    """
    half = np.uint64(max(_SMALLEST_HALF, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    keys = np.random.SeedSequence(seeds).generate_state(_ROUNDS, np.uint64)
    values = np.array(places, dtype=np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        left, right = values[outside] >> half, values[outside] & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        values[outside] = left << half | right
        outside = values >= n
    return values.astype(np.int64)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    for multiplier in _MULTIPLIERS:
        values = (values ^ (values >> np.uint64(33))) * multiplier
    return values ^ (values >> np.uint64(33))
