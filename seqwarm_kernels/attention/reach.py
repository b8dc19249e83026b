"""The keys that each head of a layer visits, measured on random queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops import backends
from ..ops.alibi_attention.schema import RANGE_BLOCK
from .calls import DEFAULT_SKIP_TOLERANCE, DenseCall, check_dense
from .slopes import alibi_slopes


@dataclass(frozen=True)
class ReachSettings:
    """Settings of a layer.

    Attributes:
        heads: number of heads, with the slopes of `alibi_slopes`.
        length: number of queries, and of keys.
        head_dim, causal, window, skip_tolerance: as in `alibi_attention`.
        score_std: standard deviation of the scores before the bias. Larger scores reach farther.
        seed: seed of the queries and keys.
    """

    heads: int
    length: int
    head_dim: int = 64
    causal: bool = True
    window: int | None = None
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE
    score_std: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Reach:
    """The keys that blocks of `RANGE_BLOCK` queries visit, and the share of the visible keys that these are."""

    settings: ReachSettings
    backend: str
    slopes: Tensor  #: (heads,)
    visited: Tensor  #: (heads, blocks, 2) int64, first key and end
    visible: Tensor  #: (blocks, 2) int64, the same if nothing is skipped

    def shares(self) -> list[float]:
        """For each head, the share of the visible keys that it visits."""
        return (_count(self.visited) / _count(self.visible)).tolist()

    def share(self) -> float:
        """The share of all heads together."""
        return (_count(self.visited).mean() / _count(self.visible)).item()

    def distances(self) -> list[int]:
        """For each head, the largest distance between a query and a key that its block visits."""
        rows = torch.arange(len(self.visible)) * RANGE_BLOCK
        last_rows = (rows + RANGE_BLOCK).clamp(max=self.settings.length) - 1
        before, after = last_rows - self.visited[..., 0], self.visited[..., 1] - 1 - rows
        if self.settings.causal:
            return before.amax(1).tolist()
        return torch.maximum(before, after).amax(1).tolist()

    def to_json(self) -> dict[str, Any]:
        """Plain values: the settings, and slope, share and distance of each head."""
        heads = zip(self.slopes.tolist(), self.shares(), self.distances(), strict=True)
        return {
            **vars(self.settings),
            "backend": self.backend,
            "attended_share": self.share(),
            "per_head": [
                {"head": index, "slope": slope, "attended_share": share, "largest_distance": distance}
                for index, (slope, share, distance) in enumerate(heads)
            ],
        }

    def table(self) -> str:
        widths = (4, 8, 21, 16)
        rows = [("head", "slope", "share of keys visited", "largest distance")]
        rows += [
            (
                str(head["head"]),
                f"{head['slope']:.5f}",
                f"{head['attended_share']:.1%}",
                f"{head['largest_distance']:,}",
            )
            for head in self.to_json()["per_head"]
        ]
        rows.append(("all", "", f"{self.share():.1%}", ""))
        return "\n".join("  ".join(map(str.rjust, row, widths)).rstrip() for row in rows)


@torch.no_grad()
def measure_reach(settings: ReachSettings) -> Reach:
    """Run attention on random normal queries and keys, and read which keys it visited.

    Raises:
        ValueError: a setting is out of range.
        RuntimeError: no backend of this machine skips keys.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = backends.choose("alibi_attention", device, None, torch.float32)
    if backend == "reference":
        reasons = [backends.why_not("alibi_attention", name, device) for name in ("native", "triton")]
        raise RuntimeError(f"no kernel that skips keys is available: {'; '.join(filter(None, reasons))}")
    generator = torch.Generator().manual_seed(settings.seed)
    query, key = torch.randn(2, 1, settings.heads, settings.length, settings.head_dim, generator=generator).to(device)
    query *= settings.score_std
    slopes = alibi_slopes(settings.heads)
    one_head = query[:, :1], key[:, :1], slopes[:1].to(device)  # all heads see the same keys
    return Reach(
        settings,
        backend,
        slopes,
        visited=_ranges(settings, query, key, slopes.to(device), settings.skip_tolerance),
        visible=_ranges(settings, *one_head, 0.0)[0],
    )


def _ranges(settings: ReachSettings, query: Tensor, key: Tensor, slopes: Tensor, skip_tolerance: float) -> Tensor:
    call = DenseCall(
        query,
        key,
        key,  # values do not matter
        slopes,
        causal=settings.causal,
        window=settings.window,
        skip_tolerance=skip_tolerance,
    )
    operator, tensors, options = check_dense(call)
    *_, ranges = operator(*tensors, *options)
    return ranges[0].unflatten(1, (-1, 2)).long().cpu()


def _count(ranges: Tensor) -> Tensor:
    return (ranges[..., 1] - ranges[..., 0]).clamp(min=0).sum(-1).double()
