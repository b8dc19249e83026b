"""Schemas and fake implementations of `seqwarm::alibi_attention`, its varlen form, and their backward.

The public functions resolve all defaults. Slopes, scale and positions are explicit: query i of row b is at position
`query_start[b] + query_offset + i` (query_start None: 0), and key j is at position j. In packed sequence b, query i is
at `query_start[b] + i` (None: len_k − len_q + i). `dropout_seed` is a tensor when dropout_p > 0: a seed for all heads,
or a seed and offsets for each head. dropout.py defines the dropout mask of both.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..library import define

BACKENDS = ("triton", "native", "reference")

#: Dtypes of the public functions for which a backend has no kernel.
LACKING: dict[str, tuple[torch.dtype, ...]] = {"triton": (torch.float64,), "native": (torch.float64,)}
#: The position of the first query is at most this far from the first key, so that sums of positions fit into 64 bits.
FARTHEST_POSITION = 2**60
#: Number of neighboring queries that share an entry of `ranges`.
RANGE_BLOCK = 32

_TENSORS = "Tensor query, Tensor key, Tensor value, Tensor slopes"
_DENSE = (
    "Tensor? query_start, Tensor? key_padding_mask, Tensor? dropout_seed, SymInt query_offset, bool causal, "
    "float scale, SymInt? segment_length, SymInt? window, float dropout_p, float skip_tolerance, "
    "Tensor? key_norm_bound=None"
)
_VARLEN = (
    "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? dropout_seed, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "bool causal, float scale, SymInt? window, float dropout_p, float skip_tolerance, Tensor? query_start=None"
)
_BACKWARD = (
    "Tensor grad_out, Tensor? grad_lse, Tensor out, Tensor lse, Tensor log2_sum, Tensor ranges, bool slopes_need_grad"
)
_OUTPUTS = "(Tensor out, Tensor lse, Tensor log2_sum, Tensor ranges)"
_GRADIENTS = "(Tensor grad_query, Tensor grad_key, Tensor grad_value, Tensor grad_slopes)"


class DenseOptions(NamedTuple):
    """The operator's arguments after query (B, Hq, Sq, D), key, value (B, Hkv, Sk, D), slopes (Hq) or (B, Hq)."""

    query_start: Tensor | None  # (B) or (1)
    key_padding_mask: Tensor | None  # (B, Sk) bool
    dropout_seed: Tensor | None  # () or (B, Hq, 4) int64
    query_offset: int
    causal: bool
    scale: float
    segment_length: int | None
    window: int | None
    dropout_p: float
    skip_tolerance: float
    key_norm_bound: Tensor | None = None  # (B, Hkv) float32


class VarlenOptions(NamedTuple):
    """The operator's arguments after query (Tq, Hq, D), key, value (Tk, Hkv, D), slopes (Hq) or (B, Hq)."""

    cu_seqlens_q: Tensor  # (B + 1) int32
    cu_seqlens_k: Tensor  # (B + 1) int32
    dropout_seed: Tensor | None  # () or (Hq, 4) int64
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    scale: float
    window: int | None
    dropout_p: float
    skip_tolerance: float
    query_start: Tensor | None = None  # (B) or (1)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def allocate_like(tensor: Tensor) -> Tensor:
    """An uninitialized dense tensor of the same shape. Keeps tokens before heads in memory, as projections return."""
    if tensor.dim() == 4 and tensor.stride(1) < tensor.stride(2):
        batch_size, heads, length, head_dim = tensor.shape
        return tensor.new_empty((batch_size, length, heads, head_dim)).transpose(1, 2)
    return tensor.new_empty(tensor.shape)


def allocate_outputs(query: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Uninitialized outputs of forward. Also the fake implementation of forward.

    out       as query.
    lse       (B, Hq, Sq), or (Hq, Tq).
    log2_sum  as lse, for backward: log2 of the same sum, with every distance reduced by that to the nearest position
              that has a key. The lse of a query far from its keys is large, and rounding it would cost backward its
              precision.
    ranges    (B, Hq, 2⌈Sq / RANGE_BLOCK⌉), or (Hq, 2⌈Tq / RANGE_BLOCK⌉) int32: start and end of the keys that a block
              of queries attended. Keys outside weigh less than skip_tolerance, and backward skips them, too.
    """
    rows = query.shape[:-1] if query.dim() == 4 else (query.shape[1], query.shape[0])
    num_ranges = (rows[-1] + RANGE_BLOCK - 1) // RANGE_BLOCK
    lse = query.new_empty(rows, dtype=accumulation_dtype(query.dtype))
    # Pairs in one dimension: sizes of 1 are special to torch.compile, which would compile once more for short rows.
    ranges = query.new_empty((*rows[:-1], 2 * num_ranges), dtype=torch.int32)
    return allocate_like(query), lse, torch.empty_like(lse), ranges


def _fake_backward(
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
    *options: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients shaped as their tensors. grad_slopes is empty unless `slopes_need_grad`. grad_lse None: zeros."""
    grad_slopes = slopes.new_empty(slopes.shape if slopes_need_grad else (0,))
    return allocate_like(query), allocate_like(key), allocate_like(value), grad_slopes


define("alibi_attention", f"({_TENSORS}, {_DENSE}) -> {_OUTPUTS}", BACKENDS, fake=allocate_outputs)
define("alibi_attention_varlen", f"({_TENSORS}, {_VARLEN}) -> {_OUTPUTS}", BACKENDS, fake=allocate_outputs)
define(
    "alibi_attention_backward",
    f"({_BACKWARD}, {_TENSORS}, {_DENSE}) -> {_GRADIENTS}",
    BACKENDS,
    fake=_fake_backward,
)
define(
    "alibi_attention_varlen_backward",
    f"({_BACKWARD}, {_TENSORS}, {_VARLEN}) -> {_GRADIENTS}",
    BACKENDS,
    fake=_fake_backward,
)
