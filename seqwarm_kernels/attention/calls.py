"""Checked calls of the attention operators, with defaults filled in."""

from __future__ import annotations

import math
import warnings
from typing import TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..ops import backends
from ..ops.alibi_attention import validation
from ..ops.alibi_attention.schema import DenseOptions, VarlenOptions
from ..ops.call_kind import is_readable
from ..ops.library import overload
from ..utils.checks import check_bool, check_int, is_dtensor
from .slopes import default_slopes

DEFAULT_SKIP_TOLERANCE = 2**-24

_MOST_HEADS = 128  #: of published models

_Options = TypeVar("_Options", DenseOptions, VarlenOptions)


def dense_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None,
    *,
    causal: bool,
    scale: float | None = None,
    segment_length: int | None = None,
    query_start: int | Tensor | None = None,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    skip_tolerance: float,
    key_norm_bound: Tensor | None = None,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[OpOverload, tuple[Tensor, ...], DenseOptions]:
    """Check the arguments of `alibi_attention` and fill in defaults.

    Args:
        dropout_seed: () or (B, Hq, 4) int64, as in dropout.py, if dropout_p > 0. Default: drawn from the device's
            generator.

    Returns:
        The operator that serves the call, its tensors, and its options.
    """
    query, key, value = cast_for_autocast(query), cast_for_autocast(key), cast_for_autocast(value)
    validation.check_query_key_value(query, key, value, "(batch, heads, length, head_dim)")
    validation.check_batch(query, key)
    batch_size, num_heads, query_length, head_dim = query.shape
    validation.check_heads(num_heads, key.shape[1])
    if slopes is None:
        if num_heads > max(_MOST_HEADS, query_length) and not torch.compiler.is_compiling():
            warnings.warn(
                f"query {tuple(query.shape)} has {num_heads} heads of {query_length} tokens; if it is "
                "(batch, length, heads, head_dim), transpose query, key and value, else pass slopes",
                stacklevel=3,
            )
        slopes = default_slopes(num_heads, query.device)
    validation.check_slopes(slopes, query, batch_size, num_heads)
    validation.check_no_transform(query, key, value, slopes)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    check_bool("causal", causal)
    validation.check_options(scale, window, dropout_p, skip_tolerance)
    if key_padding_mask is not None:
        validation.check_key_padding_mask(key_padding_mask, query, key)
    if key_norm_bound is not None:
        validation.check_key_norm_bound(key_norm_bound, query, key)
    if segment_length is not None:
        validation.check_segment_length(segment_length, query_start, query, key)
    if query_start is None:
        query_start = key.shape[2] - query_length
    validation.check_query_start(query_start, query)

    options = DenseOptions(
        query_start=query_start.view(-1) if isinstance(query_start, Tensor) else None,
        key_padding_mask=key_padding_mask,
        dropout_seed=dropout_seed_of(dropout_p, query) if dropout_seed is None else dropout_seed,
        query_offset=0 if isinstance(query_start, Tensor) else query_start,
        causal=causal,
        scale=scale,
        segment_length=segment_length,
        window=window,
        dropout_p=dropout_p,
        skip_tolerance=skip_tolerance,
        key_norm_bound=key_norm_bound,
    )
    return _distributed(_operator("alibi_attention", query, backend), (query, key, value, slopes), options)


def varlen_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    slopes: Tensor | None,
    *,
    causal: bool,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    skip_tolerance: float,
    dropout_seed: Tensor | None = None,
    backend: str | None = None,
) -> tuple[OpOverload, tuple[Tensor, ...], VarlenOptions]:
    """`dense_call` for `alibi_attention_varlen`. `dropout_seed` is () or (Hq, 4)."""
    query, key, value = cast_for_autocast(query), cast_for_autocast(key), cast_for_autocast(value)
    validation.check_query_key_value(query, key, value, "(tokens, heads, head_dim)")
    num_heads, head_dim = query.shape[1:]
    validation.check_heads(num_heads, key.shape[1])
    validation.check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, query)
    validation.check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, query)
    validation.check_same_batch(cu_seqlens_q, cu_seqlens_k)
    check_int("max_seqlen_q", max_seqlen_q, minimum=0)
    check_int("max_seqlen_k", max_seqlen_k, minimum=0)
    if slopes is None:
        slopes = default_slopes(num_heads, query.device)
    validation.check_slopes(slopes, query, cu_seqlens_q.numel() - 1, num_heads)
    validation.check_no_transform(query, key, value, slopes)
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    check_bool("causal", causal)
    validation.check_options(scale, window, dropout_p, skip_tolerance)
    if dropout_p > 0 and is_readable(cu_seqlens_q, cu_seqlens_k):  # before a seed is drawn
        validation.check_packing(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)

    options = VarlenOptions(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        dropout_seed=dropout_seed_of(dropout_p, query) if dropout_seed is None else dropout_seed,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        scale=scale,
        window=window,
        dropout_p=dropout_p,
        skip_tolerance=skip_tolerance,
    )
    return _distributed(_operator("alibi_attention_varlen", query, backend), (query, key, value, slopes), options)


def _distributed(
    operator: OpOverload, tensors: tuple[Tensor, ...], options: _Options
) -> tuple[OpOverload, tuple[Tensor, ...], _Options]:
    """A checked call, with its arguments placed on the query's mesh if there are DTensors."""
    if any(is_dtensor(entry) for entry in (*tensors, *options)):
        from ..ops.alibi_attention.sharding import distribute  # loads torch.distributed.tensor

        tensors, options = distribute(tensors, options)
    return operator, tensors, options


def _operator(name: str, query: Tensor, backend: str | None) -> OpOverload:
    return overload(name, backends.choose(name, query.device.type, backend, query.dtype))


def cast_for_autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts the operands of a matrix product. float64 is not cast.

    An autocast rule for the whole operator would cast the slopes too. Anything but a tensor is left for the checks.
    """
    if not isinstance(tensor, Tensor) or tensor.is_meta:  # autocast does not support the meta device
        return tensor
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


def dropout_seed_of(dropout_p: float, query: Tensor) -> Tensor | None:
    """A seed from the device's own generator: reproducible, and without a copy from the host."""
    if dropout_p == 0:
        return None
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device)
