"""Models with learned position embeddings: GPT-2, OPT, BERT, RoBERTa, DistilBERT."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..surgery import NoPositions, Surgery, register_alibi

_MODELS = "transformers.models"


@register_alibi(f"{_MODELS}.gpt2.modeling_gpt2.GPT2Attention", f"{_MODELS}.opt.modeling_opt.OPTAttention")
def convert_decoder_attention(module: Any, surgery: Surgery) -> None:
    if not getattr(module, "is_cross_attention", False):
        surgery.give_alibi(module, module.num_heads, causal=is_causal(module))


@register_alibi(
    f"{_MODELS}.bert.modeling_bert.BertSelfAttention",
    f"{_MODELS}.roberta.modeling_roberta.RobertaSelfAttention",
    f"{_MODELS}.distilbert.modeling_distilbert.DistilBertSelfAttention",
)
def convert_encoder_attention(module: Any, surgery: Surgery) -> None:
    kind = getattr(module.config, "position_embedding_type", None)
    if kind not in (None, "absolute"):
        raise ValueError(f"config.position_embedding_type must be 'absolute', got {kind!r}")
    surgery.give_alibi(module, module.config.num_attention_heads, causal=is_causal(module))


@register_alibi(f"{_MODELS}.gpt2.modeling_gpt2.GPT2Model")
def convert_gpt2(module: Any, surgery: Surgery) -> None:
    _remove_table(module.wpe, surgery)


@register_alibi(f"{_MODELS}.opt.modeling_opt.OPTDecoder")
def convert_opt(module: Any, surgery: Surgery) -> None:
    _remove_table(module.embed_positions, surgery)
    surgery.set(module, "max_target_positions", surgery.max_seq_length)


@register_alibi(
    f"{_MODELS}.bert.modeling_bert.BertEmbeddings",
    f"{_MODELS}.roberta.modeling_roberta.RobertaEmbeddings",
    f"{_MODELS}.distilbert.modeling_distilbert.Embeddings",
)
def convert_encoder_embeddings(module: Any, surgery: Surgery) -> None:
    """Remove the table, and lengthen the buffers that are as long as the table."""
    _remove_table(module.position_embeddings, surgery)
    length = max(surgery.max_seq_length + first_position(module), module.position_ids.shape[1])
    positions = torch.arange(length, device=module.position_ids.device)[None]
    surgery.set(module, "position_ids", positions)
    if hasattr(module, "token_type_ids"):
        surgery.set(module, "token_type_ids", torch.zeros_like(positions))


def _remove_table(table: nn.Embedding | NoPositions, surgery: Surgery) -> None:
    if isinstance(table, NoPositions):  # removed by an earlier call
        surgery.set(table, "shape", (surgery.max_seq_length, table.shape[1]))
        return
    weight = table.weight
    zeros = NoPositions(surgery.max_seq_length, weight.shape[1], device=weight.device, dtype=weight.dtype)
    surgery.replace(table, zeros)


def first_position(model: nn.Module) -> int:
    """Return the index of the first position in the embeddings of the model.

    In RoBERTa positions start after the padding token. Its buffers and its config count the positions before, too.
    """
    embeddings = [module for module in model.modules() if hasattr(module, "position_embeddings")]
    padding = [getattr(module, "padding_idx", None) for module in embeddings]
    return max((index + 1 for index in padding if index is not None), default=0)


def is_causal(module: Any) -> bool:
    """Return whether the attention is causal. A config may make a decoder bidirectional."""
    return module.is_causal and getattr(module.config, "is_causal", True) is not False
