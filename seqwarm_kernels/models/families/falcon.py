"""Falcon: with ALiBi of its own it keeps its slopes; with rotary embeddings it gets the usual ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.models.falcon.modeling_falcon import FalconAttention

from ...attention.slopes import alibi_slopes
from ..transformers_attention import attention_forward


class AlibiFalconAttention(FalconAttention):
    """Neither a dense bias nor a rotation is read."""

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        heads = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in heads)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.inv_norm_factor)
        return self.dense(out.flatten(2)), None


def falcon_slopes(num_heads: int, head_dim: int) -> list[float]:
    """As Falcon was trained: slopes of bfloat16, scaled as the scores are."""
    return (alibi_slopes(num_heads).to(torch.bfloat16).double() * head_dim**-0.5).tolist()
