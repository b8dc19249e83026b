"""The dropout mask of attention weights: a pure function of a seed and of the indices of a weight.

The mask is not stored. Forward, backward and every backend compute it from the seed. The random bits are those of
Philox-4x32-10 (J. K. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose four outputs serve
four neighboring keys: weight (head, query, key) takes output `key % 4` of the counter (key // 4, query, head, 0).
A weight is kept when its 32 bits, as an integer, are at least dropout_p * 2^32.

An operator's `dropout_seed` has one of two forms, both int64:

- (): the seed. `head` counts through batch and heads, `query` and `key` from 0. For packed sequences, `query` and `key`
  count through the packed tokens.
- (B, Hq, 4), or (Hq, 4) for packed sequences: the head offsets. For each head the seed, the number `head`, and what
  `query` and `key` count from. A call on a part of the batch, heads, queries or keys then draws the mask of the whole.

The first key of a head must be a multiple of 4. `head`, `query` and `key // 4` must be smaller than 2^32. Neither is
checked, since values stay on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW_32_BITS = 0xFFFFFFFF


def dropout_offsets(seed: Tensor, batch_size: int, num_heads: int, first_query: int = 0, first_key: int = 0) -> Tensor:
    """(B, Hq, 4) int64: the head offsets of a call on the queries and keys from `first_query` and `first_key` on.

    `seed` is () int64. A slice of the result serves a part of the batch or of the heads. Those for packed sequences
    are `dropout_offsets(seed, 1, num_heads)[0]`.
    """
    head = torch.arange(batch_size * num_heads, device=seed.device).view(batch_size, num_heads)
    firsts = torch.full_like(head, first_query), torch.full_like(head, first_key)
    return torch.stack((seed.expand_as(head), head, *firsts), dim=-1)


def keep_mask(dropout_p: float, seed: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """True where a weight is kept. All tensors are int64 and broadcast to the result's shape."""
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
