"""Models that are born with ALiBi: BLOOM, MPT, Falcon. Their attention calls the kernels, and keeps its slopes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..surgery import Surgery, register_alibi

_IN = "transformers.models"


@register_alibi(f"{_IN}.bloom.modeling_bloom.BloomAttention")
def operate_on_bloom(module: Any, surgery: Surgery) -> None:
    from .bloom import AlibiBloomAttention

    surgery.give_alibi(module, module.num_heads, causal=True)
    surgery.set(module, "__class__", AlibiBloomAttention)


@register_alibi(f"{_IN}.bloom.modeling_bloom.BloomModel")
def operate_on_bloom_model(module: Any, surgery: Surgery) -> None:
    """It builds its dense bias no more; some versions could not for caches of a fixed size."""
    surgery.set(module, "build_alibi_tensor", _no_bias)


def _no_bias(attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    return attention_mask.new_zeros((), dtype=dtype)


@register_alibi(f"{_IN}.mpt.modeling_mpt.MptAttention")
def operate_on_mpt(module: Any, surgery: Surgery) -> None:
    from .mpt import AlibiMptAttention, mpt_slopes

    surgery.give_alibi(module, module.n_heads, causal=True, slopes=mpt_slopes(module.n_heads))
    surgery.set(module, "__class__", AlibiMptAttention)


@register_alibi(f"{_IN}.falcon.modeling_falcon.FalconAttention")
def operate_on_falcon(module: Any, surgery: Surgery) -> None:
    from .falcon import AlibiFalconAttention, falcon_slopes

    slopes = falcon_slopes(module.num_heads, module.head_dim) if module.config.alibi else None
    surgery.give_alibi(module, module.num_heads, causal=True, slopes=slopes)
    surgery.set(module, "__class__", AlibiFalconAttention)


@register_alibi(f"{_IN}.falcon.modeling_falcon.FalconModel")
def operate_on_falcon_model(module: Any, surgery: Surgery) -> None:
    """It builds its dense bias no more: the mask would get it added."""
    surgery.set(module, "use_alibi", False)
