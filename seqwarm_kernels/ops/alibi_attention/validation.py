"""Checks of the inputs of `alibi_attention` and `alibi_attention_varlen`.

The public functions check shapes, dtypes and devices. The operators check the values of `query_start`, `cu_seqlens_q`
and `cu_seqlens_k` in each call, on a CPU. Values on other devices are not read: the host would wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...utils.checks import check_dense, check_int, check_no_tangent, check_real, check_share
from .. import backends
from ..library import overload
from .schema import FARTHEST_POSITION, DenseOptions, VarlenOptions

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
MAX_HEAD_DIM = 256


def check_query_key_value(query: Tensor, key: Tensor, value: Tensor, layout: str) -> None:
    """Check types, ranks, dtypes, devices and shapes. `layout` names the dimensions for errors, head_dim last."""
    rank = layout.count(",") + 1
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        check_dense(name, tensor)
        check_no_tangent(name, tensor)
        if tensor.dim() != rank:
            raise ValueError(f"{name} must be {layout}, got shape {tuple(tensor.shape)}")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, float16, bfloat16 or float64, got {tensor.dtype}")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} must have the query's dtype {query.dtype}, got {tensor.dtype}")
        check_device(name, tensor, query)
    if key.shape != value.shape:
        raise ValueError(f"value must have the key's shape {tuple(key.shape)}, got {tuple(value.shape)}")
    _check_head_dim(query, key)


def _check_head_dim(query: Tensor, key: Tensor) -> None:
    head_dim = query.shape[-1]
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"query must have a head_dim from 1 to {MAX_HEAD_DIM}, got {head_dim}")
    if key.shape[-1] != head_dim:
        raise ValueError(f"key must have the query's head_dim {head_dim}, got {key.shape[-1]}")


def check_batch(query: Tensor, key: Tensor) -> None:
    if key.shape[0] != query.shape[0]:
        raise ValueError(f"key must have the query's batch size {query.shape[0]}, got {key.shape[0]}")


def check_heads(query_heads: int, key_heads: int) -> None:
    if key_heads < 1 or query_heads < 1 or query_heads % key_heads:
        raise ValueError(
            f"query must have a multiple of the key's number of heads, got {query_heads} query heads "
            f"and {key_heads} key heads"
        )


def check_device(name: str, tensor: Tensor, query: Tensor) -> None:
    if tensor.device != query.device:
        raise ValueError(f"{name} must be on the query's device {query.device}, got {tensor.device}")


def check_slopes(slopes: Tensor, query: Tensor, batch_size: int, num_heads: int) -> None:
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point():
        got = slopes.dtype if isinstance(slopes, Tensor) else type(slopes).__name__
        raise TypeError(f"slopes must be a floating-point tensor, got {got}")
    check_dense("slopes", slopes)
    check_no_tangent("slopes", slopes)
    # Size by size: torch.compile does not find a symbolic size in a tuple.
    by_row = slopes.dim() == 2 and slopes.shape[0] == batch_size
    if not (slopes.dim() == 1 or by_row) or slopes.shape[-1] != num_heads:
        raise ValueError(
            f"slopes must be ({num_heads},) or ({batch_size}, {num_heads}): one for each query head, "
            f"got {tuple(slopes.shape)}"
        )
    check_device("slopes", slopes, query)


def check_options(scale: float, window: int | None, dropout_p: float, skip_tolerance: float) -> None:
    if abs(check_real("scale", scale)) > torch.finfo(torch.float32).max:
        raise ValueError(f"scale must fit float32, got {scale}")
    if window is not None:
        check_int("window", window, minimum=0)
    check_share("dropout_p", dropout_p)
    check_share("skip_tolerance", skip_tolerance)


def check_key_padding_mask(mask: Tensor, query: Tensor, key: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"key_padding_mask must be a bool tensor, True where a key is attended, got {got}")
    check_dense("key_padding_mask", mask)
    wanted = (key.shape[0], key.shape[2])
    if tuple(mask.shape) != wanted:
        raise ValueError(f"key_padding_mask must be (batch, key_length) {wanted}, got {tuple(mask.shape)}")
    check_device("key_padding_mask", mask, query)


def check_key_norm_bound(bound: Tensor, query: Tensor, key: Tensor) -> None:
    if not isinstance(bound, Tensor) or bound.dtype != torch.float32:
        got = bound.dtype if isinstance(bound, Tensor) else type(bound).__name__
        raise TypeError(f"key_norm_bound must be a float32 tensor, got {got}")
    check_dense("key_norm_bound", bound)
    if bound.shape != key.shape[:2]:
        raise ValueError(f"key_norm_bound must be (batch, key_heads) {tuple(key.shape[:2])}, got {tuple(bound.shape)}")
    check_device("key_norm_bound", bound, query)


def check_query_start(query_start: int | Tensor, query: Tensor, count: int, which: str = "rows") -> None:
    """`count`: of rows or sequences, `which`."""
    if not isinstance(query_start, Tensor):
        if abs(check_int("query_start", query_start)) > FARTHEST_POSITION:
            raise ValueError(f"query_start must be from -2**60 to 2**60, got {query_start}")
        return
    check_dense("query_start", query_start)
    if query_start.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"query_start must be an int or an int32 or int64 tensor, got {query_start.dtype}")
    fits = query_start.numel() == 1 or query_start.numel() == count  # not `in`, as for slopes
    if query_start.dim() > 1 or not fits:
        raise ValueError(
            f"query_start must be one position or one for each of the {count} {which}, "
            f"got shape {tuple(query_start.shape)}"
        )
    check_device("query_start", query_start, query)


def check_segment_length(segment_length: int, query_start: int | Tensor | None, query: Tensor, key: Tensor) -> None:
    check_int("segment_length", segment_length, minimum=1)
    if query_start is not None:
        raise ValueError("query_start must be None with segment_length: positions start at 0 in each row")
    if query.shape[2] != key.shape[2]:
        raise ValueError(
            f"key must be as long as query with segment_length, got {query.shape[2]} queries and {key.shape[2]} keys"
        )


def check_cu_seqlens(name: str, cu_seqlens: Tensor, query: Tensor) -> None:
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype != torch.int32:
        got = cu_seqlens.dtype if isinstance(cu_seqlens, Tensor) else type(cu_seqlens).__name__
        raise TypeError(f"{name} must be an int32 tensor, got {got}")
    check_dense(name, cu_seqlens)
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1:
        raise ValueError(f"{name} must be (batch + 1,), got shape {tuple(cu_seqlens.shape)}")
    check_device(name, cu_seqlens, query)


def check_same_batch(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    if cu_seqlens_q.numel() != cu_seqlens_k.numel():
        raise ValueError(
            f"cu_seqlens_k must describe as many sequences as cu_seqlens_q, {cu_seqlens_q.numel() - 1}, "
            f"got {cu_seqlens_k.numel() - 1}"
        )


def check_values(query: Tensor, key: Tensor, options: DenseOptions | VarlenOptions) -> None:
    """The operators' checks of values. Native operators have the same in C++."""
    check_positions(options.query_start)
    if isinstance(options, VarlenOptions):
        cu_seqlens_q, cu_seqlens_k, _, max_seqlen_q, max_seqlen_k, *_ = options
        check_packing(query, key, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)


def with_checked_values(operator: str) -> Callable[..., tuple[Tensor, ...]]:
    """A native operator that checks values here: from torch 2.15 on, the stable ABI's errors are RuntimeErrors."""
    run = overload(operator, "native")
    options_type = VarlenOptions if "varlen" in operator else DenseOptions

    def checked(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *options: Any) -> tuple[Tensor, ...]:
        check_values(query, key, options_type(*options))
        return run(query, key, value, slopes, *options)

    return checked


def check_positions(query_start: Tensor | int | None) -> None:
    """Check the values of a tensor on a CPU."""
    if isinstance(query_start, Tensor) and query_start.device.type == "cpu":
        for start in query_start.view(-1).tolist():
            if abs(start) > FARTHEST_POSITION:
                raise ValueError(f"query_start must be from -2**60 to 2**60, got {start}")


def _check_packing(
    query: Tensor, key: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int
) -> None:
    """Check the values of `cu_seqlens_q` and `cu_seqlens_k` on a CPU; without the module for this torch."""
    if query.device.type == "cpu":
        if cu_seqlens_q.dim() != 1 or cu_seqlens_q.numel() == 0 or cu_seqlens_k.shape != cu_seqlens_q.shape:
            raise ValueError(
                "cu_seqlens_q and cu_seqlens_k must have the same shape (sequences + 1,), got "
                f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
            )
        check_sequences("cu_seqlens_q", cu_seqlens_q, query.shape[0], "query", max_seqlen_q)
        check_sequences("cu_seqlens_k", cu_seqlens_k, key.shape[0], "key", max_seqlen_k)


check_packing = _check_packing if backends.module is None else backends.module.check_packing


def check_sequences(name: str, cu_seqlens: Tensor, num_tokens: int, owner: str, max_seqlen: int) -> None:
    """Check the values of `cu_seqlens`, called `name`, for the `num_tokens` tokens of `owner`. The host reads them."""
    ends = cu_seqlens.tolist()
    if ends[0] != 0:
        raise ValueError(f"{name} must start with 0, got {ends[0]}")
    longest = 0
    for start, end in pairwise(ends):
        if end < start:
            raise ValueError(f"{name} must not decrease, got {end} after {start}")
        longest = max(longest, end - start)
    if ends[-1] > num_tokens:
        raise ValueError(f"{name} must end within the {num_tokens} tokens of {owner}, got {ends[-1]}")
    if longest > max_seqlen:
        name = name.replace("cu_seqlens", "max_seqlen")
        raise ValueError(f"{name} must be at least {longest}, the length of the longest sequence, got {max_seqlen}")
