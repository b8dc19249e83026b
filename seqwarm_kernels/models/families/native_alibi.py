"""Models pretrained with ALiBi: BLOOM, MPT, Falcon. Their attention calls the kernels and keeps its slopes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ...attention.slopes import alibi_slopes
from ..surgery import Surgery, register_alibi

_MODELS = "transformers.models"


@register_alibi(f"{_MODELS}.bloom.modeling_bloom.BloomAttention")
def convert_bloom_attention(module: Any, surgery: Surgery) -> None:
    from .native_alibi_attention import AlibiBloomAttention  # imports transformers

    surgery.give_alibi(module, module.num_heads, causal=True)
    surgery.set(module, "__class__", AlibiBloomAttention)


@register_alibi(f"{_MODELS}.bloom.modeling_bloom.BloomModel")
def convert_bloom_model(module: Any, surgery: Surgery) -> None:
    """Stop the model from building its dense bias. Some versions cannot build it for caches of a fixed size."""
    surgery.set(module, "build_alibi_tensor", _no_bias)


def _no_bias(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    return attention_mask.new_zeros((), dtype=dtype)


@register_alibi(f"{_MODELS}.mpt.modeling_mpt.MptAttention")
def convert_mpt_attention(module: Any, surgery: Surgery) -> None:
    from .native_alibi_attention import AlibiMptAttention

    surgery.give_alibi(module, module.n_heads, causal=True, slopes=mpt_slopes(module.n_heads))
    surgery.set(module, "__class__", AlibiMptAttention)


def mpt_slopes(num_heads: int) -> list[float]:
    """Return the slopes that MPT was trained with.

    If the number of heads is not a power of two, they are taken from the slopes of the next power of two: first every
    second slope, then the others.
    """
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** -(index * 8 / power) for index in range(1, power + 1)]
    return (slopes[1::2] + slopes[::2])[:num_heads] if power != num_heads else slopes


@register_alibi(f"{_MODELS}.falcon.modeling_falcon.FalconAttention")
def convert_falcon_attention(module: Any, surgery: Surgery) -> None:
    """A Falcon pretrained with ALiBi keeps its slopes. A Falcon with rotary embeddings gets the default slopes."""
    from .native_alibi_attention import AlibiFalconAttention

    slopes = falcon_slopes(module.num_heads, module.head_dim) if module.config.alibi else None
    surgery.give_alibi(module, module.num_heads, causal=True, slopes=slopes)
    surgery.set(module, "__class__", AlibiFalconAttention)


@register_alibi(f"{_MODELS}.falcon.modeling_falcon.FalconModel")
def convert_falcon_model(module: Any, surgery: Surgery) -> None:
    """Stop the model from building its dense bias, which would be added to the mask."""
    surgery.set(module, "use_alibi", False)


def falcon_slopes(num_heads: int, head_dim: int) -> list[float]:
    """Return the slopes that Falcon was trained with: rounded to bfloat16, and scaled like the scores."""
    return (alibi_slopes(num_heads, device="cpu").to(torch.bfloat16).double() * head_dim**-0.5).tolist()
