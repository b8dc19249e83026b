"""Ways to compute ALiBi attention, or attention without bias, with torch: each with the options that are fastest."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from seqwarm_kernels import alibi_attention, alibi_bias, alibi_slopes
from seqwarm_kernels.attention.calls import DEFAULT_SKIP_TOLERANCE
from seqwarm_kernels.ops import backends

from .flex import alibi_score, block_mask
from .problems import Problem

# Timing a backward alone needs retain_graph. With it, a compiled backward must not reuse the memory of its inputs.
functorch.donated_buffer = False

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Make = Callable[[Problem, torch.device], Attend]
OURS, NO_SKIP = "alibi_attention", "no skip"
OURS_NO_SKIP = f"{OURS}, {NO_SKIP}"


@dataclass(frozen=True)
class Peer:
    name: str
    make: Make
    has_bias: bool = True
    most_score_bytes: float = float("inf")  #: larger problems are left out
    token_major: bool = False  #: fastest on tensors that lie in memory as (B, S, H, D)


# ---- alibi_attention


def _make_ours(skip_tolerance: float, backend: str | None) -> Make:
    def make(problem: Problem, device: torch.device) -> Attend:
        slopes = alibi_slopes(problem.heads, device=device)
        options: dict[str, Any] = {"causal": problem.causal, "segment_length": problem.segment_length}
        if problem.masked:
            shape = problem.batch_size, problem.length
            options["key_padding_mask"] = torch.ones(shape, dtype=torch.bool, device=device)
        return functools.partial(
            alibi_attention, slopes=slopes, skip_tolerance=skip_tolerance, backend=backend, **options
        )

    return make


def reference() -> Peer:
    return Peer(f"{OURS} reference", _make_ours(DEFAULT_SKIP_TOLERANCE, "reference"))


def ours(device: torch.device, dtype: torch.dtype) -> list[Peer]:
    """alibi_attention on its default backend, with and without skipping of keys."""
    name = f"{OURS} {backends.choose('alibi_attention', device.type, None, dtype)}"
    return [Peer(name, _make_ours(DEFAULT_SKIP_TOLERANCE, None)), Peer(f"{name}, {NO_SKIP}", _make_ours(0.0, None))]


# ---- FlexAttention


def _make_flex(problem: Problem, device: torch.device, kernel_options: Any = None) -> Attend:
    """FlexAttention, compiled for one problem. Score and mask are formulas, and masked blocks are left out."""
    torch._dynamo.reset()  # otherwise torch runs the ninth problem without compiling it
    return functools.partial(
        torch.compile(flex_attention, dynamic=False),
        score_mod=alibi_score(alibi_slopes(problem.heads, device=device), causal=problem.causal),
        block_mask=block_mask(problem.length, device, causal=problem.causal, segment_length=problem.segment_length),
        enable_gqa=problem.heads != problem.key_heads,
        kernel_options=kernel_options,
    )


def flex_documents(cu_seqlens: Tensor, slopes: Tensor, tokens: int) -> Attend:
    """FlexAttention over packed causal sequences: (1, H, T, D) in and out."""
    torch._dynamo.reset()
    positions = torch.arange(tokens, device=cu_seqlens.device)
    document = torch.searchsorted(cu_seqlens[1:].long(), positions, right=True)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (document[i] == document[j]) & (i >= j)

    mask = create_block_mask(visible, None, None, tokens, tokens, device=cu_seqlens.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)
    return functools.partial(compiled, score_mod=alibi_score(slopes, causal=True), block_mask=mask)


# ---- scaled_dot_product_attention, and plain matrix products


def _by_segments(make: Make) -> Make:
    """For a peer without segments: cuts rows into segments. The cut is a view if the batch has one row."""

    def cut(tensor: Tensor, length: int) -> Tensor:
        return tensor.unflatten(2, (-1, length)).transpose(1, 2).flatten(0, 1)

    def made(problem: Problem, device: torch.device) -> Attend:
        length = problem.segment_length
        if length is None:
            return make(problem, device)
        rows = problem.batch_size * problem.length // length
        attend = make(replace(problem, batch_size=rows, length=length, segment_length=None), device)

        def attend_segments(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            out = attend(cut(query, length), cut(key, length), cut(value, length))
            return out.unflatten(0, (problem.batch_size, -1)).transpose(1, 2).flatten(2, 3)

        return attend_segments

    return made


def _bias(problem: Problem, device: torch.device) -> Tensor:
    slopes = alibi_slopes(problem.heads, device=device)
    return alibi_bias(slopes, problem.length, problem.length, causal=problem.causal).to(problem.dtype)


def _make_eager(problem: Problem, device: torch.device) -> Attend:
    bias, group = _bias(problem, device), problem.heads // problem.key_heads
    scale = problem.head_dim**-0.5

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (tensor.repeat_interleave(group, 1) if group > 1 else tensor for tensor in (key, value))
        return (query @ key.mT * scale + bias).softmax(-1) @ value

    return attend


def _make_sdpa(*kernels: SDPBackend, biased: bool) -> Make:
    def make(problem: Problem, device: torch.device) -> Attend:
        mask = _bias(problem, device)[None] if biased else None  # a 3-D mask is slow on CPUs
        causal = problem.causal and not biased
        shared = problem.heads != problem.key_heads

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            with sdpa_kernel(list(kernels)):
                return scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=causal, enable_gqa=shared
                )

        return attend

    return make


def _make_flash(module: str) -> Make:
    """`flash_attn_func` of a module, which takes and returns (B, S, H, D)."""

    def make(problem: Problem, device: torch.device) -> Attend:
        flash_attn_func = importlib.import_module(module).flash_attn_func

        def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            token_major = (tensor.transpose(1, 2) for tensor in (query, key, value))
            out = flash_attn_func(*token_major, causal=problem.causal)
            return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

        return attend

    return make


EAGER = Peer("eager with bias", _by_segments(_make_eager), most_score_bytes=2**33)
MASK = Peer(
    "SDPA with bias mask",  # flash takes masks on CPUs only
    _by_segments(_make_sdpa(SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH, biased=True)),
    most_score_bytes=2**34,
)
CUDNN_MASK = Peer(
    "SDPA cuDNN with bias mask",
    _by_segments(_make_sdpa(SDPBackend.CUDNN_ATTENTION, biased=True)),
    most_score_bytes=2**34,
)
FLASH = Peer("SDPA flash, no bias", _by_segments(_make_sdpa(SDPBackend.FLASH_ATTENTION, biased=False)), has_bias=False)
CUDNN = Peer("SDPA cuDNN, no bias", _by_segments(_make_sdpa(SDPBackend.CUDNN_ATTENTION, biased=False)), has_bias=False)
FLEX = Peer("FlexAttention", _make_flex)
FLEX_ROWS = Peer("FlexAttention, rows cut", _by_segments(_make_flex))
FLEX_FLASH = Peer("FlexAttention on flash-attn-4", functools.partial(_make_flex, kernel_options={"BACKEND": "FLASH"}))
FLASH_3 = Peer("flash-attn-3, no bias", _make_flash("flash_attn_interface"), has_bias=False, token_major=True)
FLASH_4 = Peer("flash-attn-4, no bias", _by_segments(_make_flash("flash_attn.cute")), has_bias=False)


def flex_peers(problem: Problem) -> list[Peer]:
    """FlexAttention with each set of options. The last one needs flash-attn-4."""
    peers = [FLEX] if problem.segment_length is None else [FLEX, FLEX_ROWS]
    return [*peers, FLEX_FLASH] if _has_flash_4() else peers


def hopper_peers() -> list[Peer]:
    """The fastest attention without bias on a Hopper GPU. The last one needs flash-attn-3."""
    return [CUDNN, FLASH_3] if _has_flash_3() else [CUDNN]


def _has_flash_3() -> bool:
    return importlib.util.find_spec("flash_attn_interface") is not None


def _has_flash_4() -> bool:
    return bool(importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"))


def all_peers(problem: Problem, device: torch.device) -> list[Peer]:
    """alibi_attention and every peer whose scores fit into memory."""
    peers = [*ours(device, problem.dtype), *flex_peers(problem), FLASH]
    if device.type == "cuda":
        peers += [CUDNN, CUDNN_MASK, *([FLASH_4] if _has_flash_4() else [])]
    return [peer for peer in [*peers, MASK, EAGER] if problem.score_bytes() <= peer.most_score_bytes]
