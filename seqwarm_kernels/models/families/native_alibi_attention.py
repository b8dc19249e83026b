"""Attention modules of models pretrained with ALiBi. They call the kernels instead of adding a dense bias.

Their forwards name every argument that transformers passes. Another keyword is a TypeError: in `**kwargs`, an argument
that a version of transformers renames would be lost without an error.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.mpt.modeling_mpt import MptAttention

from ..transformers_attention import attention_forward


class AlibiBloomAttention(BloomAttention):
    """Ignores `alibi`, the dense bias (B · H, 1, K) that the model builds in each forward."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
    ) -> tuple[Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.inv_norm_factor)
        out = self._dense(out.flatten(2))
        return residual + functional.dropout(out, p=self.hidden_dropout, training=self.training), None

    def _dense(self, x: Tensor) -> Tensor:
        """Multiply in slices if the config asks for the rounding of a checkpoint trained in tensor-parallel ranks."""
        if not (self.pretraining_tp > 1 and self.slow_but_exact):
            return self.dense(x)
        parts = zip(x.chunk(self.pretraining_tp, -1), self.dense.weight.chunk(self.pretraining_tp, 1), strict=True)
        return sum(functional.linear(part, weight) for part, weight in parts)  # type: ignore[return-value]


class AlibiMptAttention(MptAttention):
    """Ignores `position_bias`, the dense bias (H, 1, max_seq_len) that the model builds in each forward.

    `past_key_values` is called `cache` since transformers 5.24.
    """

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        position_bias: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor, None]:
        mixed = self.Wqkv(hidden_states)
        if self.clip_qkv:
            mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
        query, key, value = mixed.unflatten(-1, (3, self.n_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        cache = past_key_values if cache is None else cache
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        dropout = self.attn_dropout_p if self.training else 0.0
        out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.softmax_scale)
        return self.out_proj(out.flatten(2)), None


class AlibiFalconAttention(FalconAttention):
    """Ignores the dense bias `alibi` and the rotation `position_embeddings`."""

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor | None = None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, None]:
        heads = self._split_heads(self.query_key_value(hidden_states))
        query, key, value = (part.transpose(1, 2) for part in heads)
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.inv_norm_factor)
        return self.dense(out.flatten(2)), None
