"""Attention calls that are measured, their inputs, and the problems of each stage of a GPU run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor


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
    masked: bool = False  #: with a key_padding_mask that hides nothing, so that only the path differs

    def flops(self) -> float:
        """Floating-point operations of the forward. With segments, only pairs within a segment count."""
        pairs = self.length * (self.segment_length or self.length)
        return 4.0 * self.batch_size * self.heads * pairs * self.head_dim * (0.5 if self.causal else 1.0)

    def score_bytes(self) -> int:
        """Size of all scores in float32."""
        return 4 * self.batch_size * self.heads * self.length * (self.segment_length or self.length)

    def moved_bytes(self) -> int:
        """Bytes that a forward has to read and write."""
        heads = 2 * self.heads + 2 * self.key_heads
        return self.batch_size * self.length * heads * self.head_dim * self.dtype.itemsize

    def case(self) -> str:
        kind = "causal" if self.causal else "full"
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}/{self.key_heads}"
        segments = "" if self.segment_length is None else f" L{self.segment_length}"
        masked = ", mask" if self.masked else ""
        return f"{kind} B{self.batch_size} H{heads} S{self.length} D{self.head_dim}{segments}{masked}"

    def facts(self) -> dict[str, Any]:
        """The properties that records are looked up by."""
        names = ("batch_size", "heads", "key_heads", "length", "head_dim", "causal", "segment_length", "masked")
        return {name: getattr(self, name) for name in names}


def draw(problem: Problem, kind: str, device: torch.device) -> list[Tensor]:
    """Query, key and value.

    Args:
        kind: "a" for standard normal inputs; "b" for scores with a standard deviation of 3, and one key in a hundred
            with 4 times the norm.
    """
    torch.manual_seed(0)
    query, key, value = (
        torch.randn(problem.batch_size, heads, problem.length, problem.head_dim, device=device)
        for heads in (problem.heads, problem.key_heads, problem.key_heads)
    )
    if kind == "b":
        query *= 3
        key *= torch.where(torch.rand(problem.length, 1, device=device) < 0.01, 4.0, 1.0)
    return [tensor.to(problem.dtype).requires_grad_() for tensor in (query, key, value)]


def of_length(length: int, head_dim: int) -> Problem:
    """16k tokens of 2048 features, or one longer row."""
    heads = 2048 // head_dim
    return Problem(max(1, 16384 // length), heads, heads, length, head_dim)


TINY = Problem(2, 2, 2, 64, 16, dtype=torch.float32)
_SEGMENTS = Problem(1, 12, 12, 65536, 64)
_8K = of_length(8192, 128)


def paths(tiny: bool) -> list[Problem]:
    """Every path of the kernels at a short and a long length, each without and with a mask."""
    chosen = [TINY] if tiny else [of_length(length, head_dim) for length in (4096, 16384) for head_dim in (128, 64)]
    return [replace(problem, masked=masked) for masked in (False, True) for problem in chosen]


def long(tiny: bool) -> list[Problem]:
    return [TINY] if tiny else [of_length(length, head_dim) for length in (8192, 16384) for head_dim in (128, 64)]


def lengths(tiny: bool) -> list[Problem]:
    """The lengths that `long` leaves out, where warmup begins first, and other kinds of calls."""
    if tiny:
        return [replace(TINY, length=32), replace(TINY, key_heads=1, causal=False)]
    first = [of_length(length, head_dim) for length in (1024, 4096, 128, 2048, 512, 256) for head_dim in (128, 64)]
    short = [of_length(length, 64) for length in (8, 32, 64, 16)]
    others = [
        replace(_8K, causal=False),
        replace(_8K, key_heads=4),
        replace(of_length(8192, 64), causal=False),
        of_length(32768, 128),
        replace(of_length(16384, 64), batch_size=4),
        of_length(32768, 64),
    ]
    return short + first + others


def decoding(tiny: bool) -> list[Problem]:
    """`length` counts keys."""
    if tiny:
        return [replace(TINY, length=600)]
    heads = ((12, 12, 64), (32, 8, 128))
    return [
        Problem(batch_size, *of_heads[:2], keys, of_heads[2])
        for of_heads in heads
        for batch_size in (1, 8)
        for keys in (8192, 16384, 1024)
    ]


def segments(tiny: bool) -> list[Problem]:
    if tiny:
        return [replace(TINY, segment_length=8)]
    return [replace(_SEGMENTS, segment_length=length) for length in (8, 64, 256, 16, 128, 32)]
