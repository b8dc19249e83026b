"""The share of the visible keys that attention visits: how much `skip_tolerance` leaves out."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..ops.alibi_attention.schema import DenseOptions, VarlenOptions
from ..utils.devices import to_float64
from .calls import DEFAULT_SKIP_TOLERANCE, DenseCall, VarlenCall, check_dense, check_varlen


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
    """The share of the visible keys that `alibi_attention` attends for these inputs, for each head.

    Counts the keys from the first to the last one that a block of queries attends, relative to the same count with
    skip_tolerance=0. 1 means that nothing is skipped. The share depends on the inputs, because they decide how far a
    query reaches. The reference skips nothing. Runs the attention twice, so it is meant for inspection, not training.

    Args:
        query, key, value, slopes, ...: As for `alibi_attention`.

    Returns:
        (B, Hq) float64 in [0, 1]; 1 for a head without any visible key. For tensors on MPS, which has no float64, on
        the CPU.

    Raises:
        TypeError, ValueError: As for `alibi_attention`.
    """
    call = DenseCall(
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
        skip_tolerance=skip_tolerance,
        backend=backend,
    )
    return _attended_share(*check_dense(call))


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
    query_start: int | Tensor | None = None,
    window: int | None = None,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    backend: str | None = None,
) -> Tensor:
    """`attended_share` for `alibi_attention_varlen`: one share for all sequences together.

    Returns:
        (Hq,) float64 in [0, 1].
    """
    call = VarlenCall(
        query,
        key,
        value,
        slopes,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal=causal,
        scale=scale,
        window=window,
        skip_tolerance=skip_tolerance,
        backend=backend,
        query_start=query_start,
    )
    return _attended_share(*check_varlen(call))


def _attended_share(operator: OpOverload, tensors: tuple[Tensor, ...], options: DenseOptions | VarlenOptions) -> Tensor:
    attended = _count_keys(operator(*tensors, *options))
    visible = _count_keys(operator(*tensors, *options._replace(skip_tolerance=0.0)))
    return torch.where(visible > 0, attended / visible, 1.0)


def _count_keys(outputs: tuple[Tensor, ...]) -> Tensor:
    """For each head, the number of keys in the ranges that the operator visited."""
    *_, ranges = outputs  # pairs of first and end
    return to_float64((ranges[..., 1::2] - ranges[..., ::2]).clamp(min=0).sum(-1))
