"""Models with learned position embeddings: GPT-2, OPT, BERT, RoBERTa, DistilBERT."""

from __future__ import annotations

from typing import Any

import torch

from ..surgery import NoPositions, Surgery, register_alibi

_IN = "transformers.models"


@register_alibi(f"{_IN}.gpt2.modeling_gpt2.GPT2Attention", f"{_IN}.opt.modeling_opt.OPTAttention")
def operate_on_decoder_attention(module: Any, surgery: Surgery) -> None:
    if not getattr(module, "is_cross_attention", False):
        surgery.give_alibi(module, module.num_heads, causal=is_causal(module))


@register_alibi(
    f"{_IN}.bert.modeling_bert.BertSelfAttention",
    f"{_IN}.roberta.modeling_roberta.RobertaSelfAttention",
    f"{_IN}.distilbert.modeling_distilbert.DistilBertSelfAttention",
)
def operate_on_encoder_attention(module: Any, surgery: Surgery) -> None:
    kind = getattr(module.config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise ValueError(
            f"config.position_embedding_type must be 'absolute', got {kind!r}: positions act inside of its scores; "
            "load the model with position_embedding_type='absolute'"
        )
    surgery.give_alibi(module, module.config.num_attention_heads, causal=is_causal(module))


@register_alibi(f"{_IN}.gpt2.modeling_gpt2.GPT2Model")
def operate_on_gpt2(module: Any, surgery: Surgery) -> None:
    surgery.replace(module.wpe, NoPositions())


@register_alibi(f"{_IN}.opt.modeling_opt.OPTDecoder")
def operate_on_opt(module: Any, surgery: Surgery) -> None:
    surgery.replace(module.embed_positions, NoPositions())
    surgery.set(module, "max_target_positions", surgery.max_seq_length)


@register_alibi(
    f"{_IN}.bert.modeling_bert.BertEmbeddings",
    f"{_IN}.roberta.modeling_roberta.RobertaEmbeddings",
    f"{_IN}.distilbert.modeling_distilbert.Embeddings",
)
def operate_on_encoder_embeddings(module: Any, surgery: Surgery) -> None:
    """Their buffers are as long as the table was."""
    surgery.replace(module.position_embeddings, NoPositions())
    length = surgery.max_seq_length + first_position(module)
    positions = torch.arange(length, device=module.position_ids.device)[None]
    surgery.set(module, "position_ids", positions)
    if hasattr(module, "token_type_ids"):
        surgery.set(module, "token_type_ids", torch.zeros_like(positions))


def first_position(embeddings: Any) -> int:
    """RoBERTa counts from behind its padding token."""
    padding_idx = getattr(embeddings, "padding_idx", None)
    return 0 if padding_idx is None else padding_idx + 1


def is_causal(module: Any) -> bool:
    """Decoders can be told by their configuration to see both ways."""
    return module.is_causal and getattr(module.config, "is_causal", True) is not False
