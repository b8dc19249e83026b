"""How much of the keys attention really visits: what `skip_tolerance` left out, seen from outside."""

from __future__ import annotations

import torch
from torch import Tensor

from .functional import DEFAULT_SKIP_TOLERANCE, attend, attend_varlen


@torch.no_grad()
def attended_share(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    segment_length: int | None = None,
    query_start: int | Tensor | None = None,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    backend: str | None = None,
) -> Tensor:
    """The share of keys in sight that `alibi_attention` attends for these inputs, for each head.

    Counted in the keys between the first and the last one that a block of queries attends, relative to the same
    with skip_tolerance=0: so 1 means that nothing is skipped. It depends on the inputs, since how far a query
    reaches does. The reference skips nothing. Runs the attention; to look at, not to train with.

    Args:
        as for `alibi_attention`.

    Returns:
        (B, Hq) float64 in [0, 1]; 1 for a head without any key in sight.

    Raises:
        TypeError, ValueError: as `alibi_attention` does.
    """

    def attended(tolerance: float) -> Tensor:
        *_, ranges = attend(
            query,
            key,
            value,
            slopes,
            causal=causal,
            scale=scale,
            segment_length=segment_length,
            query_start=query_start,
            window=window,
            key_padding_mask=key_padding_mask,
            dropout_p=0.0,
            skip_tolerance=tolerance,
            backend=backend,
        )
        return ranges

    return _share(attended(skip_tolerance), attended(0.0))


@torch.no_grad()
def attended_share_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    slopes: Tensor | None = None,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    backend: str | None = None,
) -> Tensor:
    """`attended_share` for `alibi_attention_varlen`, over all sequences together.

    Returns:
        (Hq,) float64 in [0, 1].
    """

    def attended(tolerance: float) -> Tensor:
        *_, ranges = attend_varlen(
            query,
            key,
            value,
            cu_seqlens_q,
            cu_seqlens_k,
            max_seqlen_q,
            max_seqlen_k,
            slopes,
            causal=causal,
            scale=scale,
            window=window,
            dropout_p=0.0,
            skip_tolerance=tolerance,
            backend=backend,
        )
        return ranges

    return _share(attended(skip_tolerance), attended(0.0))


def _share(attended: Tensor, in_sight: Tensor) -> Tensor:
    """From ranges: pairs of first and end."""
    counts = [(ranges[..., 1::2] - ranges[..., ::2]).clamp(min=0).sum(-1).double() for ranges in (attended, in_sight)]
    return torch.where(counts[1] > 0, counts[0] / counts[1], 1.0)
