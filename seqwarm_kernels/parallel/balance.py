"""The work of ranks that share the heads of a layer, and an order of slopes that balances it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.slopes import alibi_slopes


def balanced_slopes(num_heads: int, num_ranks: int, *, device: torch.device | str | None = None) -> Tensor:
    """`alibi_slopes(num_heads)` in an order that gives ranks with neighboring heads about the same work.

    Steep heads attend few keys, flat heads many. With the usual order the last rank has all flat heads. Here the ranks
    take slopes in turns, from the steepest to the flattest: rank 0 to P − 1, P − 1 to 0, and so on (snake order). The
    slopes of a rank are neighbors, and decrease.

    For models that are trained from the start: `apply_alibi(model, slopes=balanced_slopes(num_heads, num_ranks))`. The
    heads of a trained model are bound to their slopes. To reorder them, permute the heads of its weights, too.

    Args:
        num_heads: H, a multiple of num_ranks.
        num_ranks: P, the ranks of tensor parallelism or Ulysses.
        device: Device of the result.

    Returns:
        (H,) float32. Rank r has the slopes r · H/P to (r + 1) · H/P − 1.

    Raises:
        TypeError, ValueError: `num_heads` is not an int, or not at least 1.
        RuntimeError: num_ranks does not divide the heads.
    """
    turns = alibi_slopes(num_heads, device=device).sort(descending=True).values.view(-1, num_ranks)
    turns[1::2] = turns[1::2].flip(1)
    return turns.T.flatten()


@dataclass(frozen=True)
class RankWork:
    """The attention that each rank computes in a layer.

    Attributes:
        shares: For each rank, the share of the visible keys that its heads attend.
    """

    shares: tuple[float, ...]

    def mean(self) -> float:
        return sum(self.shares) / len(self.shares)

    def imbalance(self) -> float:
        """The work of the slowest rank, relative to the mean: 1 if all have the same, P if one does everything."""
        return max(self.shares) / self.mean() if self.mean() else 1.0

    def table(self) -> str:
        rows = [("rank", "share of keys visited", "relative to the mean")]
        rows += [
            (str(rank), f"{share:.1%}", f"{share / self.mean():.2f}" if self.mean() else "")
            for rank, share in enumerate(self.shares)
        ]
        rows.append(("all", f"{self.mean():.1%}", f"largest {self.imbalance():.2f}"))
        return "\n".join("  ".join(map(str.rjust, row, (4, 21, 20))).rstrip() for row in rows)


def rank_work(attended_share: Tensor, num_ranks: int) -> RankWork:
    """The work of each rank if neighboring heads are sharded over ranks, from what `attended_share` returns.

    Args:
        attended_share: (H,) or (B, H), the share of the visible keys that each head attends. H must be a multiple of
            num_ranks.
        num_ranks: P, the ranks of tensor parallelism or Ulysses.

    Raises:
        RuntimeError: num_ranks does not divide the heads.
    """
    of_ranks = attended_share.cpu().double().unflatten(-1, (num_ranks, -1)).mean(-1)
    return RankWork(tuple((of_ranks if of_ranks.dim() == 1 else of_ranks.mean(0)).tolist()))
