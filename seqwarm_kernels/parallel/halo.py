"""The exchange of the halo: the last tokens of the shards before a rank's, and the first of those after it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class Shared(NamedTuple):
    """A tensor (B, H, c, D) of which other ranks need some tokens, and how many of each head (H,)."""

    tensor: Tensor
    widths: Sequence[int]


class Halo(NamedTuple):
    """The tokens beyond a shard, (B, H, W, D) on each side. Tokens that were not sent, or do not exist, are zeros."""

    before: Tensor
    after: Tensor

    def around(self, local: Tensor, before: int, after: int) -> Tensor:
        """The local tokens with those next to them."""
        start = self.before.shape[2] - before
        return torch.cat([self.before[:, :, start:], local, self.after[:, :, :after]], 2)


def exchange(shared: Sequence[Shared], mesh: DeviceMesh, *, causal: bool) -> list[Halo]:
    """Send every tensor's tokens to the ranks that need them, in one collective.

    The collective is not waited for: it travels until a result is used. Backward sends the gradients back. All ranks
    take part in it, also those that sent or received nothing.

    Args:
        shared: Tensors of one dtype and device.
        mesh: One dimension.
        causal: Send tokens to later ranks only, so that W is 0 after a shard.
    """
    rank, size = mesh.get_local_rank(), mesh.size()
    outgoing = [list(_cuts(shared, rank, other, causal)) for other in range(size)]
    incoming = [list(_cuts(shared, other, rank, causal)) for other in range(size)]  # for their shapes
    received = collectives.all_to_all_single_autograd(
        torch.cat([cut.flatten() for cuts in outgoing for cut in cuts]),
        [sum(cut.numel() for cut in cuts) for cuts in incoming],
        [sum(cut.numel() for cut in cuts) for cuts in outgoing],
        mesh,
    )
    parts = iter(received.split([cut.numel() for cuts in incoming for cut in cuts]))
    arrived = [[next(parts).view_as(cut) for cut in cuts] for cuts in incoming]
    before, after = zip(*arrived[: rank + 1], strict=True), zip(*arrived[rank:], strict=True)
    halos = []
    for _, widths in shared:
        width = max(widths)
        left = [_pad(next(before), width, is_before=True) for _ in _runs(widths)]
        right = [_pad(next(after), 0 if causal else width, is_before=False) for _ in _runs(widths)]
        halos.append(Halo(torch.cat(left, 1), torch.cat(right, 1)))
    return halos


def _runs(widths: Sequence[int]) -> Iterator[tuple[slice, int]]:
    """Neighboring heads of one width."""
    start = 0
    for end in range(1, len(widths) + 1):  # not groupby, for which torch.compile would fix the widths
        if end == len(widths) or widths[end] != widths[start]:
            yield slice(start, end), widths[start]
            start = end


def _cuts(shared: Sequence[Shared], sender: int, receiver: int, causal: bool) -> Iterator[Tensor]:
    """What one rank sends to another: for each tensor, some tokens of neighboring heads of one width, or none."""
    is_asked = receiver > sender or (receiver < sender and not causal)
    for tensor, widths in shared:
        shard_length = tensor.shape[2]
        for heads, width in _runs(widths):
            nearer = (abs(sender - receiver) - 1) * shard_length  # tokens of the shards between
            taken = min(max(width - nearer, 0), shard_length) if is_asked else 0
            start = shard_length - taken if sender < receiver else 0
            yield tensor[:, heads, start : start + taken]


def _pad(pieces: Sequence[Tensor], width: int, *, is_before: bool) -> Tensor:
    """The pieces of all ranks in order, with zeros on the far side."""
    batch_size, heads, _, head_dim = pieces[0].shape
    missing = width - sum(piece.shape[2] for piece in pieces)
    zeros = pieces[0].new_zeros(batch_size, heads, missing, head_dim)
    return torch.cat([zeros, *pieces] if is_before else [*pieces, zeros], 2)
