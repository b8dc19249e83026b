"""Ways to get ALiBi attention, or the same without its bias, from torch: each set up at its best."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes
from seqwarm_kernels.ops import backends

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Problem:
    """One call of attention: (B, H, S, D) queries, `key_heads` key heads."""

    batch_size: int
    heads: int
    key_heads: int
    length: int
    head_dim: int
    causal: bool = True
    segment_length: int | None = None
    dtype: torch.dtype = torch.bfloat16

    def flops(self) -> float:
        """Of the forward; the backward counts 2.5 times that. Segments count only what they attend."""
        span = self.segment_length or self.length
        pairs = self.length * span
        return 4.0 * self.batch_size * self.heads * pairs * self.head_dim * (0.5 if self.causal else 1.0)

    def score_bytes(self) -> float:
        return 4.0 * self.batch_size * self.heads * self.length**2


@dataclass(frozen=True)
class Peer:
    name: str
    make: Callable[[Problem, torch.device], Attend]
    has_bias: bool = True
    has_backward: bool = True
    most_score_bytes: float = float("inf")  #: larger problems are left out


def _ours(skip_tolerance: float) -> Callable[[Problem, torch.device], Attend]:
    def make(problem: Problem, device: torch.device) -> Attend:
        slopes = alibi_slopes(problem.heads, device=device)
        options: dict[str, Any] = {"causal": problem.causal, "segment_length": problem.segment_length}
        return lambda q, k, v: alibi_attention(q, k, v, slopes, skip_tolerance=skip_tolerance, **options)

    return make


def _bias(problem: Problem, device: torch.device) -> Tensor:
    slopes = alibi_slopes(problem.heads, device=device)
    bias = alibi_bias(slopes, problem.length, problem.length, causal=problem.causal)
    if problem.segment_length is not None:
        segment = torch.arange(problem.length, device=device) // problem.segment_length
        bias = bias.masked_fill(segment[:, None] != segment, float("-inf"))
    return bias.to(problem.dtype)


def eager(problem: Problem, device: torch.device) -> Attend:
    bias, group = _bias(problem, device), problem.heads // problem.key_heads
    scale = problem.head_dim**-0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (key, value))
        return (query @ key.mT * scale + bias).softmax(-1) @ value

    return attend


def sdpa(*kernels: SDPBackend) -> Callable[[Problem, torch.device], Attend]:
    """Without the bias: what ALiBi would cost if it were free. No kernels: whichever torch picks."""

    def make(problem: Problem, device: torch.device) -> Attend:
        shared = problem.heads != problem.key_heads

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(list(kernels)) if kernels else nullcontext():
                return scaled_dot_product_attention(query, key, value, is_causal=problem.causal, enable_gqa=shared)

        return attend

    return make


def sdpa_with_bias(problem: Problem, device: torch.device) -> Attend:
    mask, shared = _bias(problem, device), problem.heads != problem.key_heads
    return lambda query, key, value: scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=shared)


def flex(kernel_options: Any) -> Callable[[Problem, torch.device], Attend]:
    def make(problem: Problem, device: torch.device) -> Attend:
        slopes = alibi_slopes(problem.heads, device=device)
        segment_length = problem.segment_length or problem.length

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score - slopes[h] * (i - j if problem.causal else (i - j).abs())

        def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            same = i // segment_length == j // segment_length
            return same & (i >= j) if problem.causal else same

        masked = problem.causal or problem.segment_length is not None
        block_mask = None
        if masked:
            block_mask = create_block_mask(visible, None, None, problem.length, problem.length, device=device.type)
        compiled = torch.compile(flex_attention, dynamic=False)
        return functools.partial(
            compiled,
            score_mod=score_mod,
            block_mask=block_mask,
            enable_gqa=problem.heads != problem.key_heads,
            kernel_options=kernel_options,
        )

    return make


def ours() -> list[Peer]:
    serving = backends.choose("alibi_attention", "cuda" if torch.cuda.is_available() else "cpu", None, torch.bfloat16)
    return [
        Peer(f"alibi_attention {serving}, skip_tolerance=0", _ours(0.0)),
        Peer(f"alibi_attention {serving}", _ours(2**-24)),
    ]


def everyone() -> Iterator[Peer]:
    yield from ours()
    yield Peer("FlexAttention", flex(None))
    if importlib.util.find_spec("flash_attn") is not None:  # flash-attn 4, with ALiBi as its score_mod
        yield Peer("FlexAttention FLASH", flex({"BACKEND": "FLASH"}))
    yield Peer("SDPA flash, no bias", sdpa(SDPBackend.FLASH_ATTENTION), has_bias=False)
    yield Peer("SDPA cuDNN, no bias", sdpa(SDPBackend.CUDNN_ATTENTION), has_bias=False)
    yield Peer("SDPA, bias mask", sdpa_with_bias, most_score_bytes=2**34)
    yield Peer("eager", eager, most_score_bytes=2**33)
