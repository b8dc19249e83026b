"""How many tokens beyond its shard a rank's queries reach: the widths of the halo.

The bound is that of docs/kernels/skipping.md. With a = |scale| · ‖q‖ · K, where K bounds the norms of keys, the keys at
distances >= d hold at most the share ε of a query's softmax sum if

    d >= (a − L − ln(1 − e^(−slope)) − ln ε) / slope.

L is a lower bound of the log of the sum: the score of the query's own key, whose distance is 0. So d is known before
any attention.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

BLOCK = 64  #: widths are multiples of it, so that few of them differ

_RAISED = 1 + 2**-9  # margins for rounding, as in the proof
_MARGIN = 2**-4 * math.log(2)
_OWN_SCORE_MARGIN = 2**-10
_SMALLEST_SLOPE = 2**-16 * math.log(2)  #: flatter heads reach everything


class Queries(NamedTuple):
    """A query reaches the distance (norm · K + rest) / slope, if no key's norm exceeds K."""

    norm: Tensor  #: (B, Hkv, G, c), times the scale; G query heads share a key head
    rest: Tensor  #: (B, Hkv, G, c)
    slope: Tensor  #: (B or 1, Hkv, G, 1)

    def distance(self, key_norm: Tensor) -> Tensor:
        """key_norm (B, Hkv) -> (B, Hkv, G, c)"""
        reached = (self.norm * (key_norm[..., None, None] * _RAISED) + self.rest) / self.slope
        return torch.where(self.slope > _SMALLEST_SLOPE, reached, math.inf).nan_to_num(nan=math.inf, posinf=math.inf)


@torch.no_grad()
def choose_widths(
    query: Tensor,
    key: Tensor,
    slopes: Tensor,
    key_padding_mask: Tensor | None,
    *,
    scale: float,
    skip_tolerance: float,
    halo: list[int] | None,
    widest: int,
    causal: bool,
    mesh: DeviceMesh,
) -> list[int]:
    """The width of the halo for each key head.

    Args:
        query: (B, Hq, c, D), the local shard.
        key: (B, Hkv, c, D).
        slopes: (Hq,) or (B, Hq).
        key_padding_mask: (B, c), or None. Queries of padding ask for nothing.
        skip_tolerance: The share of a query's sum that the keys beyond the halo may hold.
        halo: The widths given by the caller, or None.
        widest: The widest halo that any rank can use.
    """
    widest = min(-(-widest // 4) * 4, (mesh.size() - 1) * key.shape[2])
    given = None if halo is None else [min(-(-width // 4) * 4, widest) for width in halo]
    if widest == 0 or (given is not None and min(given) == widest):
        return [widest] * key.shape[1]
    if given is None and torch.compiler.is_compiling():
        raise ValueError("halo must be an int under torch.compile, got None, which makes the host wait for a width")
    largest, queries = key_norms_and_queries(
        query, key, slopes, key_padding_mask, scale=scale, skip_tolerance=skip_tolerance, causal=causal
    )
    bound = _Bound(_gathered(largest, key.shape[2], mesh), queries, causal, mesh)
    if given is None:
        return [min(width, widest) for width in bound.narrowest()]
    bound.check(given, widest)
    return given


class _Bound(NamedTuple):
    """The widths that the queries of all ranks need."""

    largest: Tensor  #: (P, B, Hkv), the largest key norm of each shard
    queries: Queries  #: of this rank
    causal: bool
    mesh: DeviceMesh

    @property
    def length(self) -> int:
        return self.queries.norm.shape[-1]

    def narrowest(self) -> list[int]:
        """The narrowest widths that fit, rounded up. Waits for the device."""
        size, length = self.mesh.size(), self.length
        widths: dict[int, int] = {}
        heads = range(self.largest.shape[2])
        for first in range(1, size):
            for head, needed in enumerate(self._needed([first for _ in heads]).tolist()):
                if head not in widths and needed <= first * length:
                    widths[head] = rounded_up(max(needed, (first - 1) * length))
            if len(widths) == len(heads):
                break
        return [widths.get(head, rounded_up((size - 1) * length)) for head in heads]

    def check(self, given: list[int], widest: int) -> None:
        """Assert, without waiting for the device, that the given widths fit."""
        needed = self._needed([width // self.length + 1 for width in given]).clamp(max=widest)
        torch._assert_async(
            (needed <= needed.new_tensor(given)).all(),
            "halo is too narrow: keys beyond it weigh more than skip_tolerance. halo_widths returns widths that fit",
        )

    def _needed(self, firsts: list[int]) -> Tensor:
        """The widths (Hkv,) as floats if, for each key head, only shards at least `first` away may stay beyond them.

        The same on all ranks.
        """
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        widths = self._needed_beyond([range(max(rank - first + 1, 0)) for first in firsts])
        if not self.causal:
            after = self._needed_beyond([range(rank + first, size) for first in firsts], is_before=False)
            widths = torch.maximum(widths, after)
        return collectives.all_reduce(widths, "max", self.mesh)

    def _needed_beyond(self, shards: list[range], *, is_before: bool = True) -> Tensor:
        """The widths on one side, for the shards of each key head there."""
        bounds = [self.largest[there.start : there.stop, :, head] for head, there in enumerate(shards)]
        largest = torch.stack([functional.pad(norms, (0, 0, 0, 1)).amax(0) for norms in bounds], -1)
        width = width_for(self.queries.distance(largest), is_before=is_before)
        width = functional.pad(width.transpose(0, 1).flatten(1), (0, 1)).amax(1)
        return width.masked_fill(torch.tensor([len(there) == 0 for there in shards], device=width.device), 0)


def width_for(distance: Tensor, *, is_before: bool = True) -> Tensor:
    """The tokens of the halo that the queries (..., c) of a shard need, on one side, to reach as far as `distance`."""
    position = torch.arange(distance.shape[-1], device=distance.device)  # the distance from the shard's end
    position = position if is_before else position.flip(0)
    # Query t needs d − t tokens of the halo. Queries at t >= width attend local keys only, and must need none.
    return torch.where(distance <= position, 0, torch.maximum(distance - position, position + 1))


def rounded_up(width: float) -> int:
    """A multiple of BLOCK."""
    return math.ceil(width / BLOCK) * BLOCK


def key_norms_and_queries(
    query: Tensor,
    key: Tensor,
    slopes: Tensor,
    key_padding_mask: Tensor | None,
    *,
    scale: float,
    skip_tolerance: float,
    causal: bool,
) -> tuple[Tensor, Queries]:
    """The largest norm of a shard's keys (B, Hkv), and its queries."""
    key_norm = torch.linalg.vector_norm(key, dim=-1, dtype=_precise(key))
    if key_padding_mask is not None:
        key_norm = key_norm.masked_fill(~key_padding_mask[:, None], 0)
    largest = key_norm.amax(-1) if key_norm.numel() else key_norm.new_zeros(key_norm.shape[:2])
    share = skip_tolerance if causal else skip_tolerance / 2  # both sides share it
    return largest, _queries(query, key, key_norm, slopes, key_padding_mask, scale, share)


def _gathered(largest: Tensor, length: int, mesh: DeviceMesh) -> Tensor:
    """The largest norms of all shards, (P, B, Hkv)."""
    own = torch.cat([largest.flatten(), largest.new_full((1,), length)])
    # A sum with zeros: the names of all-gathers differ between versions of torch.
    gathered = own.new_zeros(mesh.size(), len(own))
    gathered[mesh.get_local_rank()] = own
    gathered = collectives.all_reduce(gathered, "sum", mesh)
    torch._assert_async(
        (gathered[:, -1] == length).all(), "query must hold the same number of tokens on every rank of mesh"
    )
    return gathered[:, :-1].view(len(gathered), *largest.shape)


def _queries(
    query: Tensor,
    key: Tensor,
    key_norm: Tensor,
    slopes: Tensor,
    key_padding_mask: Tensor | None,
    scale: float,
    share: float,
) -> Queries:
    heads = key.shape[1], query.shape[1] // key.shape[1]
    grouped, dtype = query.unflatten(1, heads), key_norm.dtype
    norm = abs(scale) * torch.linalg.vector_norm(grouped, dim=-1, dtype=dtype)
    if key_padding_mask is not None:
        norm = norm.masked_fill(~key_padding_mask[:, None, None], 0)
    own = scale * (grouped.to(dtype) * key[:, :, None].to(dtype)).sum(-1)
    own = own - _OWN_SCORE_MARGIN * norm * key_norm[:, :, None]
    if key_padding_mask is not None:
        own = own.masked_fill(~key_padding_mask[:, None, None], math.inf)  # reaches nothing
    slope = slopes.to(dtype).expand(-1 if slopes.dim() == 2 else 1, -1).unflatten(1, heads)[..., None]
    tail = torch.log(-torch.expm1(-slope))
    allowed = math.log(share) if share > 0 else -math.inf
    return Queries(norm, _MARGIN - own - tail - allowed, slope)


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32
