"""Attention with ALiBi: a penalty that grows linearly with distance replaces position embeddings."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .calls import DEFAULT_SKIP_TOLERANCE, DenseCall, VarlenCall
from .fast_path import attend


def alibi_attention(
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
    dropout_p: float = 0.0,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    key_norm_bound: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:  # one tensor, or two with return_lse; a union would burden every caller
    """Softmax attention with score = scale · q·k − slope · |position − j|.

    Query i has position `query_start + i`, key j has position j. The output of a query without any visible key is
    zero, and so are its gradients. Differentiable in query, key, value and slopes. Accumulates in float32 (float64
    for float64). Source of the bias: Press et al., arXiv 2108.12409.

    query, key and value may be DTensors that are sharded in rows, Shard(0), or heads, Shard(1), or replicated. Other
    tensors are then DTensors of these rows and heads, or plain tensors of all of them, the same on each rank; plain
    and default slopes are those of all heads. Results are placed as the query. Plain tensors of the local heads of a
    rank need `slopes` of these heads: the default slopes would be those of a model with fewer heads
    (`seqwarm_kernels.parallel.local_heads`).

    Args:
        query: (B, Hq, Sq, D) float32, float16, bfloat16 or float64, any strides, D from 1 to 256. Tensors that are
            (B, S, H, D), as in FlashAttention, must be transposed: without `slopes` they may pass the checks, and
            heads then attend to heads. A warning says so where S is more than 128.
        key: (B, Hkv, Sk, D), with Hq a multiple of Hkv: query head h attends to key head h // (Hq / Hkv).
        value: (B, Hkv, Sk, D).
        slopes: (Hq,) or (B, Hq), any real values. Positive ones penalize distance, as those of the paper do. Default:
            `alibi_slopes(Hq)`.
        causal: Hide the keys after a query's position: j > position. On by default, unlike in
            `scaled_dot_product_attention`.
        scale: Default: 1 / √D.
        segment_length: L. Token t belongs to segment t // L and attends only inside it, as if rows were cut into rows
            of L. Needs Sq = Sk and no query_start.
        query_start: Position of query 0: an int from -2**60 to 2**60, or a tensor () or (B,) of such ints, whose values
            are checked on a CPU. Default: Sk − Sq.
        window: Hide keys at a distance |position − j| larger than this.
        key_padding_mask: (B, Sk) bool, True where a key is attended; `nn.MultiheadAttention`'s is True where it is
            not. Masked keys and values may hold NaN, as may those that no query sees, and queries that see no key.
        dropout_p: Share of the attention weights to drop, in [0, 1). The remaining weights are divided by
            1 − dropout_p.
        skip_tolerance: ε in [0, 1). At most this share of a query's softmax sum may be left out, so that apart from
            rounding |out − exact| ≤ 2ε · max|value| / (1 − dropout_p). With 0, nothing is left out. Default: 2⁻²⁴.
        key_norm_bound: (B, Hkv) float32: in row b and head h, no key that `key_padding_mask` keeps has a larger l2 norm
            than this, or the outputs are wrong. Under autocast the norms of the cast keys count: rounding may raise
            them. For decoding: with it, a call of few queries does not read the keys that skip_tolerance lets it leave
            out. Without it, it reads all keys, and leaves out values.
        return_lse: Also return lse, the natural log of each query's softmax sum, with the bias and before dropout;
            −∞ for a query without any visible key.
        backend: None (best available), "reference", "native" or "triton".

    Returns:
        out (B, Hq, Sq, D) of the query's dtype; with return_lse also lse (B, Hq, Sq) float32 (float64 for float64).
        Under autocast, query, key and value are cast to its dtype, and slopes are not.

    Raises:
        TypeError, ValueError: An argument does not fit. The message names it. Raised before any kernel runs.
    """
    arguments = (
        query,
        key,
        value,
        slopes,
        key_padding_mask,
        causal,
        scale,
        segment_length,
        window,
        dropout_p,
        skip_tolerance,
        key_norm_bound,
        return_lse,
        backend,
        query_start,
    )
    out, lse, *_ = attend(DenseCall, arguments)
    return (out, lse) if return_lse else out


def alibi_attention_varlen(
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
    dropout_p: float = 0.0,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:  # one tensor, or two with return_lse; a union would burden every caller
    """`alibi_attention` over packed sequences of different lengths, without padding.

    Sequence b holds the queries cu_seqlens_q[b] ... cu_seqlens_q[b + 1] − 1, and likewise the keys. Its first key has
    position 0, its query i has position query_start + i. Options, dtypes, gradients and the zeros for queries without a
    key are those of `alibi_attention`. DTensors may be sharded in heads.

    Args:
        query: (Tq, Hq, D), all sequences one after another.
        key: (Tk, Hkv, D).
        value: (Tk, Hkv, D).
        cu_seqlens_q: (B + 1,) int32, starting with 0, not decreasing, at most Tq. The outputs of tokens past the last
            entry are zero. Values are checked on a CPU. On another device they are not read, as the host would wait.
        cu_seqlens_k: (B + 1,) int32, likewise, at most Tk.
        max_seqlen_q: At least the length of the longest sequence of queries. Kernels size their grid by it.
        max_seqlen_k: At least the length of the longest sequence of keys.
        slopes: (Hq,), or (B, Hq) by sequence. Default: `alibi_slopes(Hq)`.
        query_start: Position of the first query of each sequence: an int, or a tensor () or (B,), as in
            `alibi_attention`. Default: len_k − len_q, so that the last query has the position of the last key.

    Returns:
        out (Tq, Hq, D); with return_lse also lse (Hq, Tq).

    Raises:
        TypeError, ValueError: An argument does not fit. The message names it. Raised before any kernel runs.
    """
    arguments = (
        query,
        key,
        value,
        slopes,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        causal,
        scale,
        window,
        dropout_p,
        skip_tolerance,
        return_lse,
        backend,
        query_start,
    )
    out, lse, *_ = attend(VarlenCall, arguments)
    return (out, lse) if return_lse else out
