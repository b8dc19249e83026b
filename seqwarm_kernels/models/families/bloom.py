"""BLOOM: born with ALiBi; keeps its numbers."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional
from transformers.models.bloom.modeling_bloom import BloomAttention

from ..transformers_attention import attention_forward


class AlibiBloomAttention(BloomAttention):
    """The dense `alibi` that the model builds for each forward, (B · H, 1, K), is not read."""

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor,
        alibi: Tensor,
        attention_mask: Tensor | None,
        layer_past: Any = None,
        use_cache: bool = False,
        output_attentions: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        query, key, value = self._reshape(self.query_key_value(hidden_states))
        if layer_past is not None:
            key, value = layer_past.update(key, value, self.layer_idx)
        dropout = self.attention_dropout.p if self.training else 0.0
        out, _ = attention_forward(self, query, key, value, attention_mask, dropout, self.inv_norm_factor)
        out = self._dense(out.flatten(2))
        return residual + functional.dropout(out, p=self.hidden_dropout, training=self.training), None

    def _dense(self, x: Tensor) -> Tensor:
        """In slices where the checkpoint was trained in tensor-parallel ranks and the config asks for its rounding."""
        if not (self.pretraining_tp > 1 and self.slow_but_exact):
            return self.dense(x)
        parts = zip(x.chunk(self.pretraining_tp, -1), self.dense.weight.chunk(self.pretraining_tp, 1), strict=True)
        return sum(functional.linear(part, weight) for part, weight in parts)  # type: ignore[return-value]
