"""Models with rotary position embeddings: Llama, Mistral, Qwen, GPT-NeoX, ModernBERT, and others by structure."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..alibi_layer import AlibiHeads
from ..surgery import Converter, NoRotation, Surgery, register_alibi
from .learned import is_causal

_MODELS = "transformers.models"
_QUERY_SCALING = "llama_4_scaling_beta"  #: the entry of rope_parameters with β


@register_alibi(
    f"{_MODELS}.gpt_neox.modeling_gpt_neox.GPTNeoXAttention",
    f"{_MODELS}.llama.modeling_llama.LlamaAttention",
    f"{_MODELS}.mistral.modeling_mistral.MistralAttention",
    f"{_MODELS}.modernbert.modeling_modernbert.ModernBertAttention",
    f"{_MODELS}.qwen2.modeling_qwen2.Qwen2Attention",
    f"{_MODELS}.qwen3.modeling_qwen3.Qwen3Attention",
)
def convert_attention(module: Any, surgery: Surgery) -> None:
    _check_constant_scale(module, surgery)
    num_heads = getattr(module, "num_heads", module.config.num_attention_heads)
    surgery.give_alibi(module, num_heads, causal=is_causal(module))


@register_alibi(
    f"{_MODELS}.gpt_neox.modeling_gpt_neox.GPTNeoXRotaryEmbedding",
    f"{_MODELS}.llama.modeling_llama.LlamaRotaryEmbedding",
    f"{_MODELS}.mistral.modeling_mistral.MistralRotaryEmbedding",
    f"{_MODELS}.modernbert.modeling_modernbert.ModernBertRotaryEmbedding",
    f"{_MODELS}.qwen2.modeling_qwen2.Qwen2RotaryEmbedding",
    f"{_MODELS}.qwen3.modeling_qwen3.Qwen3RotaryEmbedding",
)
def convert_rotary_embedding(module: Any, surgery: Surgery) -> None:
    """Replace the rotary embedding after all attention is converted, if only ALiBi layers use it.

    A vision tower or an encoder may have a rotary embedding of its own, which stays.
    """
    path = surgery.path
    parent_path = path.rpartition(".")[0]
    parent = surgery.model.get_submodule(parent_path)

    def replace() -> None:
        parts = parent.named_modules()
        users = {name: part for name, part in parts if hasattr(part, "alibi") or _looks_up_attention(part)}
        others = [name for name, part in users.items() if not isinstance(getattr(part, "alibi", None), AlibiHeads)]
        if len(others) == len(users):
            return
        if others:
            raise ValueError(
                f"{path} rotates layers with ALiBi and layers without, such as {parent_path}.{others[0]}; see "
                "register_alibi"
            )
        frequencies = next(buffer for name, buffer in module.named_buffers() if name.endswith("inv_freq"))
        surgery.replace(module, NoRotation(2 * len(frequencies)))

    surgery.afterwards(replace)


def converter_by_structure(module: nn.Module) -> Converter | None:
    """Return a converter for an unregistered class of a decoder of transformers, or None.

    Recognized are causal attention that is looked up by name, and rotary embeddings. The verification detects
    everything else that these classes may do with positions.
    """
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    has_frequencies = any(name.endswith("inv_freq") for name, _ in module.named_buffers())
    if kind.__name__.endswith("RotaryEmbedding") and has_frequencies:
        return convert_rotary_embedding
    if _looks_up_attention(module) and getattr(module, "is_causal", False) and hasattr(module, "layer_idx"):
        return convert_attention
    return None


def _looks_up_attention(module: nn.Module) -> bool:
    """Whether the module looks up its attention function by name, as transformers' attention layers do."""
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def _check_constant_scale(module: Any, surgery: Surgery) -> None:
    """Ministral 3 and Mistral 4 multiply queries by 1 + β log(1 + ⌊position / original length⌋)."""
    beta = (getattr(module.config, "rope_parameters", None) or {}).get(_QUERY_SCALING)
    if beta:
        raise ValueError(
            f"{surgery.path} must not scale its queries by their positions, got config.rope_parameters"
            f"[{_QUERY_SCALING!r}] {beta}: set it to 0 before apply_alibi"
        )
