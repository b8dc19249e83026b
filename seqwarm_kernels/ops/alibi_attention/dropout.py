"""The dropout mask of attention weights: a pure function of a seed and of the indices of a weight.

The mask is not stored. Forward, backward and every backend compute it from the seed. The random bits are those of
Philox-4x32-10 (J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose four outputs serve
four neighboring keys: weight (head, query, key) takes output `key % 4` of the counter (key // 4, query, head, 0).
`head` counts through batch and heads. For packed sequences, `query` and `key` count through the packed tokens. A weight
is kept when its 32 bits, as an integer, are at least dropout_p * 2^32.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_32_BITS = 0xFFFFFFFF


def keep_mask(dropout_p: float, seed: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """True where a weight is kept. `head`, `query` and `key` are int64 and broadcast to the result's shape."""
    zero = torch.zeros((), dtype=torch.int64, device=seed.device)
    outputs = torch.stack(torch.broadcast_tensors(*philox(seed, key // 4, query, head, zero)))
    lane = (key % 4).expand(outputs.shape[1:])
    return outputs.gather(0, lane[None])[0] >= int(dropout_p * 2**32)


def philox(seed: Tensor, *counter: Tensor) -> tuple[Tensor, ...]:
    """Four words of 32 random bits for each counter of four words, all as int64."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW_32_BITS, (seed >> 32) & _LOW_32_BITS
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW_32_BITS, (k1 + _KEY_STEPS[1]) & _LOW_32_BITS
    return c0, c1, c2, c3


def _multiply(multiplier: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low half of a 32 x 32 bit product. int64 overflow wraps and keeps all 64 bits."""
    product = word * multiplier
    return (product >> 32) & _LOW_32_BITS, product & _LOW_32_BITS
