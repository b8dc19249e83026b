"""MPT: born with ALiBi; keeps its numbers."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor
from transformers.models.mpt.modeling_mpt import MptAttention

from ..transformers_attention import attention_forward


class AlibiMptAttention(MptAttention):
    """The dense `position_bias` that the model builds for each forward, (H, 1, max_seq_len), is not read."""

    def forward(
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = mixed.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        dropout = self.attn_dropout_p if self.training else 0.0
        out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.softmax_scale)
        return self.out_proj(out.flatten(2)), None


def mpt_slopes(num_heads: int, bias_max: float = 8) -> list[float]:
    """As MPT was trained: for numbers of heads that are no power of two, every other slope of the next one first."""
    power = 2 ** math.ceil(math.log2(num_heads))
    slopes = [2 ** -(index * bias_max / power) for index in range(1, power + 1)]
    return (slopes[1::2] + slopes[::2])[:num_heads] if power != num_heads else slopes
