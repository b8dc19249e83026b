"""The arguments of a call: checked, and as the operator takes them.

`DenseCall` and `VarlenCall` carry the arguments of the public functions. Types, shapes and devices are
checked here, values of tensors by the operators.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..ops import backends
from ..ops.alibi_attention import validation
from ..ops.alibi_attention.schema import DenseOptions, VarlenOptions
from ..ops.library import overload
from ..utils.checks import check_bool, check_int, is_dtensor
from .slopes import default_slopes

DEFAULT_SKIP_TOLERANCE = 2**-24

_MOST_HEADS = 128  #: of published models; more suggest tensors (B, S, H, D)

_Options = TypeVar("_Options", DenseOptions, VarlenOptions)


class DenseCall(NamedTuple):
    """The arguments of `alibi_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None = None
    key_padding_mask: Tensor | None = None
    causal: bool = True
    scale: float | None = None
    segment_length: int | None = None
    window: int | None = None
    dropout_p: float = 0.0
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE
    key_norm_bound: Tensor | None = None
    return_lse: bool = False
    backend: str | None = None
    query_start: int | Tensor | None = None


class VarlenCall(NamedTuple):
    """The arguments of `alibi_attention_varlen`."""

    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor | None
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool = True
    scale: float | None = None
    window: int | None = None
    dropout_p: float = 0.0
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE
    return_lse: bool = False
    backend: str | None = None
    query_start: int | Tensor | None = None


class Defaults(NamedTuple):
    """The values of arguments that are None."""

    slopes: Tensor | None
    scale: float
    query_start: int = 0


def check_dense(call: DenseCall) -> tuple[OpOverload, tuple[Tensor, ...], DenseOptions]:
    """Check the arguments of `alibi_attention`.

    Returns:
        The operator, its tensors (query, key, value, slopes), and its options.
    """
    call = DenseCall(*cast_for_autocast(call))
    query, key = call.query, call.key
    validation.check_query_key_value(query, key, call.value, "(batch, heads, length, head_dim)")
    validation.check_batch(query, key)
    batch_size, num_heads, query_length, _ = query.shape
    slopes, scale = _check_common(call, batch_size)
    if call.slopes is None and num_heads > max(_MOST_HEADS, query_length) and not torch.compiler.is_compiling():
        warnings.warn(
            f"query {tuple(query.shape)} has {num_heads} heads of {query_length} tokens; if it is "
            "(batch, length, heads, head_dim), transpose query, key and value, else pass slopes",
            stacklevel=4,
        )
    if call.key_padding_mask is not None:
        validation.check_key_padding_mask(call.key_padding_mask, query, key)
    if call.key_norm_bound is not None:
        validation.check_key_norm_bound(call.key_norm_bound, query, key)
    if call.segment_length is not None:
        validation.check_segment_length(call.segment_length, call.query_start, query, key)
    defaults = Defaults(slopes, scale, query_start=key.shape[2] - query_length)
    start = defaults.query_start if call.query_start is None else call.query_start
    validation.check_query_start(start, query, batch_size)
    arguments = complete_dense(call, defaults)
    operator = _operator("alibi_attention", query, call.backend)
    return _distributed(operator, arguments[:4], DenseOptions(*arguments[4:]))


def check_varlen(call: VarlenCall) -> tuple[OpOverload, tuple[Tensor, ...], VarlenOptions]:
    """`check_dense` for `alibi_attention_varlen`."""
    call = VarlenCall(*cast_for_autocast(call))
    query, key = call.query, call.key
    validation.check_query_key_value(query, key, call.value, "(tokens, heads, head_dim)")
    validation.check_cu_seqlens("cu_seqlens_q", call.cu_seqlens_q, query)
    validation.check_cu_seqlens("cu_seqlens_k", call.cu_seqlens_k, query)
    validation.check_same_batch(call.cu_seqlens_q, call.cu_seqlens_k)
    check_int("max_seqlen_q", call.max_seqlen_q, minimum=0)
    check_int("max_seqlen_k", call.max_seqlen_k, minimum=0)
    sequences = call.cu_seqlens_q.numel() - 1
    defaults = Defaults(*_check_common(call, sequences))
    if call.query_start is not None:
        validation.check_query_start(call.query_start, query, sequences, "sequences")
    arguments = complete_varlen(call, defaults)
    operator = _operator("alibi_attention_varlen", query, call.backend)
    return _distributed(operator, arguments[:4], VarlenOptions(*arguments[4:]))


def _check_common(call: DenseCall | VarlenCall, batch_size: int) -> tuple[Tensor, float]:
    """Check what both calls have, and return slopes and scale."""
    query, num_heads = call.query, call.query.shape[1]
    validation.check_heads(num_heads, call.key.shape[1])
    slopes = default_slopes(num_heads, query.device) if call.slopes is None else call.slopes
    validation.check_slopes(slopes, query, batch_size, num_heads)
    scale = 1 / math.sqrt(query.shape[-1]) if call.scale is None else call.scale
    check_bool("causal", call.causal)
    check_bool("return_lse", call.return_lse)
    validation.check_options(scale, call.window, call.dropout_p, call.skip_tolerance)
    return slopes, scale


def complete_dense(call: tuple[Any, ...], defaults: Defaults) -> tuple[Any, ...]:
    """The arguments of a checked `DenseCall`, with `defaults` in place of None, in the operator's order."""
    query, key, value, slopes, mask, causal, scale, segment_length, window, dropout_p, *others, _, _, start = call
    start = defaults.query_start if start is None else start
    start_tensor, offset = (start.view(-1), 0) if isinstance(start, Tensor) else (None, start)
    return (
        query,
        key,
        value,
        defaults.slopes if slopes is None else slopes,
        start_tensor,
        mask,
        None if dropout_p == 0 else _dropout_seed(query),
        offset,
        causal,
        defaults.scale if scale is None else scale,
        segment_length,
        window,
        dropout_p,
        *others,
    )


def complete_varlen(call: tuple[Any, ...], defaults: Defaults) -> tuple[Any, ...]:
    """`complete_dense` for a `VarlenCall`."""
    query, key, value, slopes, ends_q, ends_k, max_q, max_k, causal, scale, window, dropout_p, *others = call
    tolerance, _, _, start = others
    if start is not None:  # one for each sequence, or one for all
        start = start.view(-1) if isinstance(start, Tensor) else torch.full((1,), start, device=query.device)
    return (
        query,
        key,
        value,
        defaults.slopes if slopes is None else slopes,
        ends_q,
        ends_k,
        None if dropout_p == 0 else _dropout_seed(query),
        max_q,
        max_k,
        causal,
        defaults.scale if scale is None else scale,
        window,
        dropout_p,
        tolerance,
        start,
    )


def _dropout_seed(query: Tensor) -> Tensor:
    """A seed from the device's own generator: reproducible, and without a copy from the host."""
    return torch.randint(2**63 - 1, (), dtype=torch.int64, device=query.device)


def cast_for_autocast(call: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast query, key and value, which come first, as autocast casts the operands of a matrix product.

    float64 is not cast. An autocast rule for the whole operator would cast the slopes, too.
    """
    return _cast(call[0]), _cast(call[1]), _cast(call[2]), *call[3:]


def _cast(tensor: Tensor) -> Tensor:
    """Non-tensors are returned as they are; validation rejects them."""
    if not isinstance(tensor, Tensor) or tensor.is_meta:  # autocast does not support the meta device
        return tensor
    device_type = tensor.device.type
    if not torch.is_autocast_enabled(device_type) or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(device_type))


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
