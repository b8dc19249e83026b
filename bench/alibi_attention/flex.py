"""FlexAttention with ALiBi, compiled for one problem: score and mask by formula, blocks out of sight left out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from seqwarm_kernels import alibi_slopes

from .problems import Problem

# With retain_graph, which timing a backward alone needs, a compiled backward must not reuse its inputs' memory.
functorch.donated_buffer = False


def make(
    problem: Problem, device: torch.device, mode: str | None = None, kernel_options: Any = None
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    torch._dynamo.reset()  # after eight problems it would give up and run eagerly
    return functools.partial(
        torch.compile(flex_attention, dynamic=False, mode=mode),
        score_mod=score_mod(alibi_slopes(problem.heads, device=device), causal=problem.causal),
        block_mask=block_mask(problem, device),
        enable_gqa=problem.heads != problem.key_heads,
        kernel_options=kernel_options,
    )


def score_mod(slopes: Tensor, *, causal: bool) -> Callable[..., Tensor]:
    def penalise(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j if causal else (i - j).abs())

    return penalise


def block_mask(problem: Problem, device: torch.device) -> BlockMask | None:
    length, segment_length, causal = problem.length, problem.segment_length, problem.causal

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if segment_length is None:
            return i >= j
        same = i // segment_length == j // segment_length
        return same & (i >= j) if causal else same

    if segment_length is None and not causal:
        return None
    return create_block_mask(visible, None, None, length, length, device=device.type)


def documents(cu_seqlens: Tensor, slopes: Tensor, tokens: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Packed sequences, causal: (1, H, T, D) in and out."""
    torch._dynamo.reset()
    place = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].long(), place, right=True)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    mask = create_block_mask(visible, None, None, tokens, tokens, device=cu_seqlens.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, score_mod=score_mod(slopes, causal=True), block_mask=mask)
