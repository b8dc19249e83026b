"""Ways to get ALiBi attention, or the same without its bias, from torch: each set up at its best."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes
from seqwarm_kernels.attention.functional import DEFAULT_SKIP_TOLERANCE
from seqwarm_kernels.ops import backends

from . import flex
from .problems import Problem

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Make = Callable[[Problem, torch.device], Attend]
NO_SKIP = "no skip"  #: how names of ours end where nothing may be left out


@dataclass(frozen=True)
class Peer:
    name: str
    make: Make
    has_bias: bool = True
    most_score_bytes: float = float("inf")  #: larger problems are left out


def _ours(skip_tolerance: float, backend: str | None) -> Make:
    def make(problem: Problem, device: torch.device) -> Attend:
        slopes = alibi_slopes(problem.heads, device=device)
        options: dict[str, Any] = {"causal": problem.causal, "segment_length": problem.segment_length}
        return functools.partial(
            alibi_attention, slopes=slopes, skip_tolerance=skip_tolerance, backend=backend, **options
        )

    return make


def _by_segments(make: Make) -> Make:
    """For what knows no segments: cut rows into them, which is a view where the batch is one row."""

    def cut(tensor: Tensor, length: int) -> Tensor:
        return tensor.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)

    def made(problem: Problem, device: torch.device) -> Attend:
        length = problem.segment_length
        if length is None:
            return make(problem, device)
        row = Problem(
            problem.batch_size * problem.length // length,
            problem.heads,
            problem.key_heads,
            length,
            problem.head_dim,
            problem.causal,
            dtype=problem.dtype,
        )
        attend = make(row, device)

        def attend_segments(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = attend(cut(query, length), cut(key, length), cut(value, length))
            return out.unflatten(0, (problem.batch_size, -1)).transpose(1, 2).flatten(2, 3)

        return attend_segments

    return made


def _bias(problem: Problem, device: torch.device) -> Tensor:
    slopes = alibi_slopes(problem.heads, device=device)
    return alibi_bias(slopes, problem.length, problem.length, causal=problem.causal).to(problem.dtype)


def _eager(problem: Problem, device: torch.device) -> Attend:
    bias, group = _bias(problem, device), problem.heads // problem.key_heads
    scale = problem.head_dim**-0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (key, value))
        return (query @ key.mT * scale + bias).softmax(-1) @ value

    return attend


def _sdpa(*kernels: SDPBackend, biased: bool) -> Make:
    def make(problem: Problem, device: torch.device) -> Attend:
        mask = _bias(problem, device)[None] if biased else None  # with three dimensions it is slow on CPUs
        causal = problem.causal and not biased
        shared = problem.heads != problem.key_heads

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(list(kernels)):
                return scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shared
                )

        return attend

    return make


def reference() -> Peer:
    return Peer("alibi_attention reference", _ours(DEFAULT_SKIP_TOLERANCE, "reference"))


def ours(device: torch.device, dtype: torch.dtype) -> list[Peer]:
    name = f"alibi_attention {backends.choose('alibi_attention', device.type, None, dtype)}"
    return [Peer(name, _ours(DEFAULT_SKIP_TOLERANCE, None)), Peer(f"{name}, {NO_SKIP}", _ours(0.0, None))]


EAGER = Peer("eager with bias", _by_segments(_eager), most_score_bytes=2**33)
MASK = Peer(
    "SDPA with bias mask",  # flash takes masks on CPUs only
    _by_segments(_sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, biased=True)),
    most_score_bytes=2**34,
)
CUDNN_MASK = Peer(
    "SDPA cuDNN with bias mask",
    _by_segments(_sdpa(SDPBackend.CUDNN_ATTENTION, biased=True)),
    most_score_bytes=2**34,
)
FLASH = Peer("SDPA flash, no bias", _by_segments(_sdpa(SDPBackend.FLASH_ATTENTION, biased=False)), has_bias=False)
CUDNN = Peer("SDPA cuDNN, no bias", _by_segments(_sdpa(SDPBackend.CUDNN_ATTENTION, biased=False)), has_bias=False)
FLEX = Peer("FlexAttention", flex.make)
FLEX_ROWS = Peer("FlexAttention, rows cut", _by_segments(flex.make))
FLEX_TUNED = Peer("FlexAttention, max-autotune", functools.partial(flex.make, mode="max-autotune-no-cudagraphs"))
FLEX_FLASH = Peer("FlexAttention on flash-attn-4", functools.partial(flex.make, kernel_options={"BACKEND": "FLASH"}))


def flex_peers(problem: Problem) -> list[Peer]:
    """FlexAttention in all of its ways; the last one where flash-attn-4 is installed."""
    peers = [FLEX] if problem.segment_length is None else [FLEX, FLEX_ROWS]
    installed = importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute")
    return [*peers, FLEX_FLASH] if installed else peers


def everyone(problem: Problem, device: torch.device) -> list[Peer]:
    peers = [*ours(device, problem.dtype), *flex_peers(problem), FLASH]
    if device.type == "cuda":
        peers += [CUDNN, CUDNN_MASK]
    return [peer for peer in [*peers, MASK, EAGER] if problem.score_bytes() <= peer.most_score_bytes]
