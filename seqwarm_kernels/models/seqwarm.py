"""`attn_implementation="seqwarm"`: decoders of transformers attend on the fused kernels, with their own positions.

Importing this module registers the name in transformers. The attention is that of "seqwarm_alibi" with slopes 0, for
models that are not converted: segments, packed sequences and sliding windows without a dense mask.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from ..attention.context_parallel import refuse_context_parallel_style
from ..utils.checks import check_values
from .alibi_layer import attend
from .transformers_attention import (
    COMPILED_PACKING,
    check_scores,
    packing_of,
    refuse_accelerate_shards,
    window_of,
)
from .transformers_masks import ONLY_BIDIRECTIONAL, decode, encode, encode_restarts

NAME = "seqwarm"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for `AttentionInterface`, with the arguments and results of that for ALiBi.

    `attention_mask` is a result of `mask_forward`, or None, where the module says whether it is causal.
    """
    check_scores(kwargs)
    refuse_accelerate_shards(module)
    refuse_context_parallel_style(module)
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    else:  # as SDPA takes it: some modules do not know
        attention_mask, causal = attention_mask[:, :1], attention_mask.shape[1] == 1
    visible = decode(attention_mask, query, key)
    packing = packing_of(kwargs, visible)
    options: dict[str, Any] = {}
    if packing is None:
        options = {"key_padding_mask": visible.key_padding_mask, "query_start": visible.query_start}
        if visible.restarts is not None:
            check_values(~visible.restarts, COMPILED_PACKING)
    out = attend(
        query,
        key,
        value,
        packing,
        slopes=torch.zeros(query.shape[1], device=query.device),
        causal=causal,
        scale=scaling,
        window=window_of(module, sliding_window, visible, attention_mask, kwargs),
        dropout_p=dropout,
        skip_tolerance=0.0,  # without a penalty, no distance is too far
        **options,
    )
    return out.transpose(1, 2).contiguous(), None


def mask_forward(
    batch_size: int, q_length: int, kv_length: int, *offsets: Any, device: torch.device | str = "cpu", **options: Any
) -> Tensor:
    """Mask function for `AttentionMaskInterface`: as `encode`, with a second dimension of 2 if not causal."""
    config = options.get("config")
    if not _looks_up_attention(type(config).__module__):
        raise ValueError(f"attn_implementation must not be {NAME!r}: {type(config).__name__} has attention of its own")
    mask = encode(batch_size, q_length, kv_length, *offsets, device=device, **options)
    if torch.compiler.is_compiling() and options.get("attention_mask") is None and q_length == kv_length:
        mask = encode_restarts(mask, options["mask_function"], batch_size, q_length, device)
    if mask is None:
        mask = torch.empty(1, 1, 1, 0, dtype=torch.int8, device=device)
    return mask.expand(-1, 2, -1, -1) if ONLY_BIDIRECTIONAL in options else mask


@torch.compiler.assume_constant_result
def _looks_up_attention(module_of_config: str) -> bool:
    """Whether a file of models uses `AttentionInterface`. Others ignore the name, and would misread the mask."""
    models = sys.modules.get(module_of_config.replace(".configuration_", ".modeling_"))
    return models is None or hasattr(models, "ALL_ATTENTION_FUNCTIONS")


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, mask_forward)
