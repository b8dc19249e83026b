"""What `seqwarm plan --ranks` prints: the bytes that a rank receives in a layer if ranks share the tokens of rows.

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
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch

from ..attention.calls import DEFAULT_SKIP_TOLERANCE
from ..attention.slopes import alibi_slopes
from ..parallel.halo_width import key_norms_and_queries, rounded_up, width_for

RING, ALL_GATHER, ULYSSES, HALO = "ring", "all-gather", "Ulysses", "halo"


class Volume(NamedTuple):
    """Bytes that a rank receives in one layer."""

    forward: int
    backward: int


@dataclass(frozen=True)
class ContextSize:
    """One layer of attention whose tokens are sharded over ranks, with heads as in `alibi_attention`."""

    heads: int
    key_heads: int
    head_dim: int
    length: int  #: tokens of a row, those of all ranks together
    ranks: int
    batch_size: int = 1
    causal: bool = True
    bytes_per_element: int = 2

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ValueError(f"key_heads must divide the {self.heads} heads, got {self.key_heads}")
        if self.length % self.ranks:
            raise ValueError(f"length must be a multiple of the {self.ranks} ranks, got {self.length}")

    @property
    def shard_length(self) -> int:
        return self.length // self.ranks

    def bytes_of(self, heads: int, tokens: int) -> int:
        """Two vectors of each head: its key and value, or its query and output."""
        return 2 * self.batch_size * heads * tokens * self.head_dim * self.bytes_per_element

    def ring(self) -> Volume:
        shard, others = self.bytes_of(self.key_heads, self.shard_length), self.ranks - 1
        return Volume(others * shard, (others + self.ranks) * shard if others else 0)

    def all_gather(self) -> Volume:
        received = self.bytes_of(self.key_heads, self.length - self.shard_length)
        return Volume(received, received)

    def ulysses(self) -> Volume | str:
        """The volume, or why it is not possible."""
        for name, heads in (("heads", self.heads), ("key_heads", self.key_heads)):
            if heads % self.ranks:
                return f"{name} must be a multiple of the {self.ranks} ranks, got {heads}"
        received = self.bytes_of(self.heads + self.key_heads, self.shard_length) * (self.ranks - 1) // self.ranks
        return Volume(received, received)

    def halo(self, widths: Sequence[int], rank: int | None = None) -> Volume:
        """For the width of each key head: what one rank receives. Default: the most that any rank receives."""
        if rank is None:
            forward, backward = zip(*(self.halo(widths, each) for each in range(self.ranks)), strict=True)
            return Volume(max(forward), max(backward))
        before, after = rank * self.shard_length, (self.ranks - 1 - rank) * self.shard_length
        left, right = (self.bytes_of(1, sum(min(width, tokens) for width in widths)) for tokens in (before, after))
        if self.causal:
            return Volume(left, right)  # gradients arrive from the ranks that the tokens went to
        return Volume(left + right, left + right)


@torch.no_grad()
def normal_widths(size: ContextSize, *, score_std: float = 1.0, seed: int = 0, most_tokens: int = 2**17) -> list[int]:
    """About the width of each key head that `context_attention` chooses for a row of normal queries and keys.

    Heads have the usual slopes, and scores before the bias this standard deviation. The widths are a little wider than
    those of `context_attention`, because the largest norm of a key is here that of all shards.

    Longer rows than `most_tokens` get the widths of a row of so many tokens, because more tokens change them little. A
    head that reaches all of these is taken to reach all tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    group = size.heads // size.key_heads
    length = min(size.shard_length, max(most_tokens // size.ranks, 1))
    everything = (size.ranks - 1) * length
    widths = []
    for slopes in alibi_slopes(size.heads).split(group):  # a key head and a shard at a time, because they are large
        shards = []
        for _ in range(size.ranks):
            drawn = torch.randn(1, group + 1, length, size.head_dim, generator=generator)
            shard = key_norms_and_queries(
                score_std * drawn[:, 1:],
                drawn[:, :1],
                slopes,
                None,
                scale=size.head_dim**-0.5,
                skip_tolerance=DEFAULT_SKIP_TOLERANCE / 2,  # the kernels have the other half
                causal=size.causal,
            )
            shards.append(shard)
        largest = torch.stack([norm for norm, _ in shards]).amax(0)
        needed = max(float(width_for(queries.distance(largest)).max()) for _, queries in shards)
        widths.append(rounded_up(min(needed, everything)))
    return [size.length - size.shard_length if width >= everything else width for width in widths]


@dataclass(frozen=True)
class Exchanges:
    """The bytes that the ranks receive for a layer whose halo has these widths, one for each key head."""

    size: ContextSize
    widths: list[int]

    def volumes(self) -> dict[str, Volume | str]:
        """By name of the parallelism: the volume, or why the ranks cannot do it."""
        size = self.size
        volumes = size.ring(), size.all_gather(), size.ulysses(), size.halo(self.widths)
        return dict(zip((RING, ALL_GATHER, ULYSSES, HALO), volumes, strict=True))

    def to_json(self) -> dict[str, Any]:
        """Plain values: the size, the widths, and the bytes of each parallelism, or why it is not possible."""
        volumes = {
            name: {"not_possible": volume} if isinstance(volume, str) else volume._asdict()
            for name, volume in self.volumes().items()
        }
        return {**asdict(self.size), "halo_widths": self.widths, "bytes_received": volumes}

    def table(self) -> str:
        size, ring = self.size, self.size.ring()
        lines = [
            f"A rank receives in each layer, with heads: {size.heads}, key heads: {size.key_heads}, head_dim: "
            f"{size.head_dim}, tokens: {size.length:,}, ranks: {size.ranks}, rows: {size.batch_size}, bits: "
            f"{8 * size.bytes_per_element}",
            f"{'':12}{'forward':>14}{'backward':>14}{'times fewer than a ring':>26}",
        ]
        for name, volume in self.volumes().items():
            if isinstance(volume, str):
                lines.append(f"{name:12}  not possible: {volume}")
                continue
            fewer = f"{sum(ring) / sum(volume):.1f}" if sum(volume) else ""
            lines.append(f"{name:12}{megabytes(volume.forward):>14}{megabytes(volume.backward):>14}{fewer:>26}")
        widths = f"{min(self.widths):,} to {max(self.widths):,}"
        lines.append(f"The halo is about {widths} tokens wide by key head, for random normal queries and keys.")
        return "\n".join(lines)


def megabytes(count: int) -> str:
    amount = count / 1e6
    return f"{amount:,.0f} MB" if amount >= 100 else f"{amount:.3g} MB"
