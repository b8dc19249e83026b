"""The definition of ALiBi attention in plain PyTorch: dense, and exact for every `skip_tolerance`.

    score[i, j] = scale · q_i · k_j − slope · |position_i − j|      where j is visible to i, else −∞
    lse[i]      = log Σ_j exp(score[i, j])                          −∞ where i sees no key
    weight      = exp(score − lse)                                  0 where i sees no key
    out[i]      = Σ_j weight[i, j] · keep[i, j] / (1 − dropout_p) · v_j

Computed in float32, and in float64 for float64 inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..library import implement
from .dropout import dropout_offsets, keep_mask
from .schema import DenseOptions, VarlenOptions, accumulation_dtype, allocate_like, allocate_outputs
from .validation import check_values


@dataclass(frozen=True)
class Pairs:
    """Distance, visibility and dropout of every (query, key) pair. Each broadcasts to (..., H, Sq, Sk).

    Distances count from the query's position, or from the nearest key if that lies outside of the keys. All keys are
    `beyond` (..., H, Sq) farther away, which changes no weight, and would cost scores their precision.
    """

    distance: Tensor
    beyond: Tensor
    visible: Tensor
    keep: Tensor | None  # dropout mask, already divided by 1 − dropout_p


def forward(
    query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, pairs: Pairs, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """query (..., Hq, Sq, D), key and value (..., Hkv, Sk, D), slopes (..., Hq) -> out, lse, log_sum

    log_sum is the lse with the distances of `pairs`."""
    key, value = _repeat_heads(_hide(key, pairs), query), _repeat_heads(_hide(value, pairs), query)
    weights, log_sum = _softmax(query, key, slopes, pairs, scale)
    out = (weights if pairs.keep is None else weights * pairs.keep) @ value
    return out, log_sum - slopes[..., None] * pairs.beyond, log_sum


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    pairs: Pairs,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of query, key, value, and of slopes for each leading index of query: (..., Hq)"""
    num_kv_heads = key.shape[-3]
    key, value = _repeat_heads(_hide(key, pairs), query), _repeat_heads(_hide(value, pairs), query)
    weights, log_sum = _softmax(query, key, slopes, pairs, scale)
    blind = log_sum == float("-inf")  # queries that see no key, which may hold NaN
    query, grad_out = (tensor.masked_fill(blind[..., None], 0) for tensor in (query, grad_out))
    grad_lse = torch.zeros_like(log_sum) if grad_lse is None else grad_lse.masked_fill(blind, 0)
    grad_weights = grad_out @ value.mT
    kept_weights = weights
    if pairs.keep is not None:
        grad_weights, kept_weights = grad_weights * pairs.keep, weights * pairs.keep
    row_term = (weights * grad_weights).sum(-1) - grad_lse
    grad_scores = weights * (grad_weights - row_term[..., None])
    grad_query = (scale * grad_scores @ key).masked_fill(blind[..., None], 0)  # 0 · NaN is not 0
    grad_key = scale * grad_scores.mT @ query
    grad_value = kept_weights.mT @ grad_out
    # The score gradients of a query sum to grad_lse, so distances may count from anywhere. Counted from their mean, the
    # rounding errors of that sum do not matter.
    mean = (weights * pairs.distance).sum(-1)
    from_mean = (grad_scores * (pairs.distance - mean[..., None])).sum((-1, -2))
    grad_slopes = -from_mean - (grad_lse * (mean + pairs.beyond)).sum(-1)
    return grad_query, _sum_heads(grad_key, num_kv_heads), _sum_heads(grad_value, num_kv_heads), grad_slopes


def _hide(tensor: Tensor, pairs: Pairs) -> Tensor:
    """Set keys and values that no query sees to zero: they may hold NaN, and 0 · NaN is not 0."""
    return tensor.masked_fill(~pairs.visible.any(-2)[..., None], 0)


def _softmax(query: Tensor, key: Tensor, slopes: Tensor, pairs: Pairs, scale: float) -> tuple[Tensor, Tensor]:
    """Weights, 0 where a query sees no key, and the log of their sum."""
    scores = (scale * query) @ key.mT - slopes[..., None, None] * pairs.distance
    scores = scores.masked_fill(~pairs.visible, float("-inf"))
    log_sum = scores.logsumexp(dim=-1)
    return (scores - log_sum.masked_fill(log_sum == float("-inf"), 0)[..., None]).exp(), log_sum


def _repeat_heads(tensor: Tensor, query: Tensor) -> Tensor:
    """Grouped-query attention: each key head is shared by Hq / Hkv neighboring query heads."""
    return tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], dim=-3)


def _sum_heads(gradient: Tensor, num_kv_heads: int) -> Tensor:
    return gradient.unflatten(-3, (num_kv_heads, -1)).sum(-3)


def _distances(position: Tensor, j: Tensor, first: Tensor | int, end: Tensor | int) -> tuple[Tensor, Tensor]:
    """`distance` and `beyond` of Pairs, for queries at `position` (..., Sq, 1) and the keys from `first` to `end`."""
    center = position.clamp(max=end - 1).clamp(min=first)
    return (center - j).abs(), (position - center).abs()[..., 0]


def _visible(offset: Tensor, causal: bool, window: int | None) -> Tensor:
    """`offset` is position − j."""
    visible = torch.ones_like(offset, dtype=torch.bool)
    if causal:
        visible = visible & (offset >= 0)
    if window is not None:
        visible = visible & (offset.abs() <= window)
    return visible


def _keep(dropout_p: float, head_offsets: Tensor | None, i: Tensor, j: Tensor, dtype: torch.dtype) -> Tensor | None:
    """`head_offsets` is (..., Hq, 4)."""
    if head_offsets is None:
        return None
    seed, head, first_query, first_key = head_offsets[..., None, None, :].unbind(-1)
    mask = keep_mask(dropout_p, seed, head, first_query + i[:, None], first_key + j)
    return mask.to(dtype) / (1 - dropout_p)


def _head_offsets(dropout_seed: Tensor | None, batch_size: int, num_heads: int) -> Tensor | None:
    if dropout_seed is None or dropout_seed.dim() > 0:
        return dropout_seed
    return dropout_offsets(dropout_seed, batch_size, num_heads)


def _dense_pairs(query: Tensor, key: Tensor, options: DenseOptions) -> Pairs:
    batch_size, num_heads, query_length, _ = query.shape
    key_length = key.shape[2]
    i = torch.arange(query_length, device=query.device)
    j = torch.arange(key_length, device=query.device)
    position = i[:, None] + options.query_offset
    if options.query_start is not None:
        position = position + options.query_start.view(-1, 1, 1, 1)
    first, end = torch.zeros_like(i[:, None]), torch.full_like(i[:, None], key_length)
    visible = _visible(position - j, options.causal, options.window)
    if options.segment_length is not None:
        first = i[:, None] // options.segment_length * options.segment_length
        end = (first + options.segment_length).clamp(max=key_length)
        visible = visible & (first <= j) & (j < end)
    if options.key_padding_mask is not None:
        visible = visible & options.key_padding_mask[:, None, None, :]
    head_offsets = _head_offsets(options.dropout_seed, batch_size, num_heads)
    keep = _keep(options.dropout_p, head_offsets, i, j, query.dtype)
    return Pairs(*_distances(position, j, first, end), visible, keep)


class _Sequence(NamedTuple):
    """One sequence of a packed batch: its slice of the queries, of the keys, and its slopes."""

    queries: slice
    keys: slice
    slopes: Tensor
    pairs: Pairs


def _sequences(num_heads: int, slopes: Tensor, options: VarlenOptions) -> Iterator[_Sequence]:
    device = slopes.device
    starts = None if options.query_start is None else options.query_start.expand(options.cu_seqlens_q.numel() - 1)
    head_offsets = _head_offsets(options.dropout_seed, 1, num_heads)
    head_offsets = None if head_offsets is None else head_offsets.view(num_heads, 4)
    ends_q, ends_k = options.cu_seqlens_q.tolist(), options.cu_seqlens_k.tolist()
    for index, (queries, keys) in enumerate(zip(pairwise(ends_q), pairwise(ends_k), strict=True)):
        i = torch.arange(*queries, device=device)
        j = torch.arange(*keys, device=device)
        position = i[:, None] - queries[1] + keys[1]  # the last query meets the last key
        if starts is not None:
            position = i[:, None] - queries[0] + keys[0] + starts[index]
        visible = _visible(position - j, options.causal, options.window)
        keep = _keep(options.dropout_p, head_offsets, i, j, slopes.dtype)
        pairs = Pairs(*_distances(position, j, *keys), visible, keep)
        yield _Sequence(slice(*queries), slice(*keys), slopes if slopes.dim() == 1 else slopes[index], pairs)


def _upcast(*tensors: Tensor) -> list[Tensor]:
    """The tensors in the dtype that the first one is accumulated in."""
    dtype = accumulation_dtype(tensors[0].dtype)
    return [tensor.to(dtype) for tensor in tensors]


def _outputs(query: Tensor, out: Tensor, lse: Tensor, log_sum: Tensor, num_keys: int) -> tuple[Tensor, ...]:
    like_query, _, _, ranges = allocate_outputs(query)
    ranges[..., ::2] = 0  # nothing is skipped
    ranges[..., 1::2] = num_keys
    return like_query.copy_(out), lse, log_sum / math.log(2), ranges


def _gradients(gradients: Iterable[Tensor], inputs: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(allocate_like(tensor).copy_(gradient) for gradient, tensor in zip(gradients, inputs, strict=True))


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn autocast off: it would lower products that are in the accumulation dtype on purpose."""

    @wraps(function)
    def run(*arguments: Any) -> Any:
        with torch.autocast(arguments[0].device.type, enabled=False):
            return function(*arguments)

    return run


@_without_autocast
def alibi_attention(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    options = DenseOptions(*rest)
    check_values(query, key, options)
    q, k, v, m = _upcast(query, key, value, slopes)
    out, lse, log_sum = forward(q, k, v, m, _dense_pairs(q, k, options), options.scale)
    return _outputs(query, out, lse, log_sum, key.shape[2])


@_without_autocast
def alibi_attention_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    log2_sum: Tensor,
    ranges: Tensor,
    slopes_need_grad: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    options = DenseOptions(*rest)
    g, q, k, v, m = _upcast(grad_out, query, key, value, slopes)
    *gradients, grad_slopes = backward(g, grad_lse, q, k, v, m, _dense_pairs(q, k, options), options.scale)
    if not slopes_need_grad:
        grad_slopes = grad_slopes.new_empty(0)
    elif slopes.dim() == 1:
        grad_slopes = grad_slopes.sum(0)
    return (*_gradients(gradients, [query, key, value]), grad_slopes.to(slopes.dtype))


@_without_autocast
def alibi_attention_varlen(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    options = VarlenOptions(*rest)
    check_values(query, key, options)
    q, k, v, m = _upcast(query, key, value, slopes)
    out = torch.zeros_like(q)
    lse, log_sum = q.new_full((2, q.shape[1], q.shape[0]), float("-inf"))
    for sequence in _sequences(q.shape[1], m, options):
        q_part, k_part, v_part = _heads_first(sequence, q, k, v)
        part, *sums = forward(q_part, k_part, v_part, sequence.slopes, sequence.pairs, options.scale)
        out[sequence.queries] = part.transpose(0, 1)
        lse[:, sequence.queries], log_sum[:, sequence.queries] = sums
    return _outputs(query, out, lse, log_sum, key.shape[0])


@_without_autocast
def alibi_attention_varlen_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    log2_sum: Tensor,
    ranges: Tensor,
    slopes_need_grad: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    options = VarlenOptions(*rest)
    g, q, k, v, m = _upcast(grad_out, query, key, value, slopes)
    grad_query, grad_key, grad_value = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    grad_slopes = []
    for sequence in _sequences(q.shape[1], m, options):
        queries, keys = sequence.queries, sequence.keys
        q_part, k_part, v_part = _heads_first(sequence, q, k, v)
        *gradients, grad_slopes_part = backward(
            g[queries].transpose(0, 1),
            None if grad_lse is None else grad_lse[:, queries],
            *(q_part, k_part, v_part, sequence.slopes, sequence.pairs, options.scale),
        )
        for whole, part, tokens in zip(
            (grad_query, grad_key, grad_value), gradients, (queries, keys, keys), strict=True
        ):
            whole[tokens] = part.transpose(0, 1)
        grad_slopes.append(grad_slopes_part)
    total = _collect(grad_slopes, slopes) if slopes_need_grad else slopes.new_empty(0)
    return (*_gradients([grad_query, grad_key, grad_value], [query, key, value]), total.to(slopes.dtype))


def _heads_first(sequence: _Sequence, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    parts = query[sequence.queries], key[sequence.keys], value[sequence.keys]
    return [part.transpose(0, 1) for part in parts]


def _collect(by_sequence: list[Tensor], slopes: Tensor) -> Tensor:
    """(B, Hq), or (Hq) where all sequences share their slopes."""
    if not by_sequence:
        return torch.zeros_like(slopes)
    stacked = torch.stack(by_sequence)
    return stacked if slopes.dim() == 2 else stacked.sum(0)


for _function in (
    alibi_attention,
    alibi_attention_backward,
    alibi_attention_varlen,
    alibi_attention_varlen_backward,
):
    implement(_function.__name__, "reference", _function)
