"""What a rank receives in one layer when the tokens of its rows are sharded: by a ring, an all-gather, Ulysses, a halo.

Let c = S / P be the tokens of each of P ranks, and T the bytes of one token's keys and values.

Ring (H. Liu et al., "Ring Attention with Blockwise Transformers", arXiv 2310.01889): the keys and values of the other
ranks pass, (P − 1) · c · T. They pass again in backward, and their gradients take one step more, to return home:
another P · c · T. Implementations that sum gradients in float32 send more.

All-gather (A. Dubey et al., "The Llama 3 Herd of Models", arXiv 2407.21783, section 3.3.2): (P − 1) · c · T. As many
bytes of gradients in backward, if the gathered keys and values were kept.

Ulysses (S. A. Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509): queries, keys, values and outputs change from some
tokens of all heads to all tokens of some heads. A rank keeps a P-th of each, and receives the rest of the c tokens. The
gradients do the same in backward.

Halo (`context_attention`): keys and values of the W tokens next to the shard, W by key head, whatever S and P. In
backward as many bytes of their gradients. Left out are the sums that decide W, of 4 · P · (B · key_heads + 1) bytes and
of 4 · key_heads bytes, and a padding mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..attention.calls import DEFAULT_SKIP_TOLERANCE
from ..attention.slopes import alibi_slopes
from ..utils.checks import check_bool, check_int, check_real
from .halo_width import widths_of_shards


class Volume(NamedTuple):
    """Bytes that a rank receives in one layer."""

    forward: int
    backward: int


@dataclass(frozen=True)
class ContextSize:
    """One layer of attention whose tokens are sharded over ranks.

    Attributes:
        heads, key_heads, head_dim: As in `alibi_attention`.
        length: Tokens of a row, those of all ranks together.
        ranks: P, which divides length.
        batch_size: Rows.
        causal: Whether only earlier keys are visible.
        bytes_per_element: 2 for bfloat16.
    """

    heads: int
    key_heads: int
    head_dim: int
    length: int
    ranks: int
    batch_size: int = 1
    causal: bool = True
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        for name in ("heads", "key_heads", "head_dim", "length", "ranks", "batch_size", "bytes_per_element"):
            check_int(name, getattr(self, name), minimum=1)
        check_bool("causal", self.causal)
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide the {self.heads} heads, got {self.key_heads}")
        if self.length % self.ranks:
            raise ValueError(f"length must be a multiple of the {self.ranks} ranks, got {self.length}")

    @property
    def shard_length(self) -> int:
        return self.length // self.ranks

    def ring(self) -> Volume:
        if self.ranks == 1:
            return Volume(0, 0)
        shard = self._shard_bytes(self.key_heads)
        return Volume((self.ranks - 1) * shard, (self.ranks - 1) * shard + self.ranks * shard)

    def all_gather(self) -> Volume:
        received = (self.ranks - 1) * self._shard_bytes(self.key_heads)
        return Volume(received, received)

    def ulysses(self) -> Volume:
        """
        Raises:
            ValueError: The ranks do not divide the heads.
        """
        for name, heads in (("heads", self.heads), ("key_heads", self.key_heads)):
            if heads % self.ranks:
                raise ValueError(f"{name} must be a multiple of the {self.ranks} ranks, got {heads}")
        received = self._shard_bytes(self.heads + self.key_heads) * (self.ranks - 1) // self.ranks
        return Volume(received, received)

    def halo(self, widths: Sequence[int], rank: int | None = None) -> Volume:
        """
        Args:
            widths: The width of each key head.
            rank: One of the ranks. Default: the most that any rank receives.

        Raises:
            ValueError: There is not one width for each key head, or no such rank.
        """
        if len(widths) != self.key_heads:
            raise ValueError(f"widths must be one for each of the {self.key_heads} key heads, got {len(widths)}")
        for width in widths:
            check_int("widths", width, minimum=0)
        if rank is None:
            of_ranks = [self.halo(widths, each) for each in range(self.ranks)]
            return Volume(max(each.forward for each in of_ranks), max(each.backward for each in of_ranks))
        if not 0 <= check_int("rank", rank) < self.ranks:
            raise ValueError(f"rank must be in [0, {self.ranks}), got {rank}")
        before, after = rank * self.shard_length, (self.ranks - 1 - rank) * self.shard_length
        left, right = (sum(min(width, tokens) for width in widths) for tokens in (before, after))
        token = self._token_bytes(1)
        if self.causal:
            return Volume(left * token, right * token)  # gradients arrive from the ranks that the tokens went to
        return Volume((left + right) * token, (left + right) * token)

    def _shard_bytes(self, heads: int) -> int:
        return self.shard_length * self._token_bytes(heads)

    def _token_bytes(self, heads: int) -> int:
        """Two vectors of each head: its key and value, or its query and output."""
        return 2 * self.batch_size * heads * self.head_dim * self.bytes_per_element


@torch.no_grad()
def normal_widths(
    size: ContextSize,
    *,
    score_std: float = 1.0,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    seed: int = 0,
    most_tokens: int = 2**17,
) -> list[int]:
    """The widths that `context_attention` chooses for one row of normal queries and keys, with the usual slopes.

    Args:
        size: Of the layer. batch_size and bytes_per_element do not matter.
        score_std: Standard deviation of the scores before the bias. Larger scores reach farther.
        skip_tolerance: As for `context_attention`.
        seed: Seed of the queries and keys.
        most_tokens: Longer rows get the widths of a row of so many tokens, because more tokens change them little. A
            head that reaches all of these is taken to reach all tokens.

    Returns:
        One width for each key head.
    """
    check_int("seed", seed, minimum=0)
    if check_real("score_std", score_std) < 0:
        raise ValueError(f"score_std must not be negative, got {score_std}")
    generator = torch.Generator().manual_seed(seed)
    group = size.heads // size.key_heads
    drawn_length = min(size.shard_length, max(most_tokens // size.ranks, 1))
    widths = []
    for slopes in alibi_slopes(size.heads).split(group):  # one key head at a time, because long rows are large
        shards = (
            torch.randn(1, group + 1, drawn_length, size.head_dim, generator=generator) for _ in range(size.ranks)
        )
        widths += widths_of_shards(
            ((score_std * drawn[:, 1:], drawn[:, :1]) for drawn in shards),
            slopes,
            scale=size.head_dim**-0.5,
            skip_tolerance=skip_tolerance / 2,  # the kernels have the other half
            causal=size.causal,
        )
    reaches_all = (size.ranks - 1) * drawn_length
    return [(size.ranks - 1) * size.shard_length if width == reaches_all else width for width in widths]
