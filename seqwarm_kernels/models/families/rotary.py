"""Models with rotary position embeddings: Llama, Mistral, Qwen, GPT-NeoX, ModernBERT."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from ..alibi_layer import AlibiHeads
from ..surgery import NoRotation, Surgeon, Surgery, register_alibi
from .learned import is_causal

_IN = "transformers.models"


@register_alibi(
    f"{_IN}.gpt_neox.modeling_gpt_neox.GPTNeoXAttention",
    f"{_IN}.llama.modeling_llama.LlamaAttention",
    f"{_IN}.mistral.modeling_mistral.MistralAttention",
    f"{_IN}.modernbert.modeling_modernbert.ModernBertAttention",
    f"{_IN}.qwen2.modeling_qwen2.Qwen2Attention",
    f"{_IN}.qwen3.modeling_qwen3.Qwen3Attention",
)
def operate_on_attention(module: Any, surgery: Surgery) -> None:
    _check_windows_agree(module, surgery)
    num_heads = getattr(module, "num_heads", module.config.num_attention_heads)
    surgery.give_alibi(module, num_heads, causal=is_causal(module))


@register_alibi(
    f"{_IN}.gpt_neox.modeling_gpt_neox.GPTNeoXRotaryEmbedding",
    f"{_IN}.llama.modeling_llama.LlamaRotaryEmbedding",
    f"{_IN}.mistral.modeling_mistral.MistralRotaryEmbedding",
    f"{_IN}.modernbert.modeling_modernbert.ModernBertRotaryEmbedding",
    f"{_IN}.qwen2.modeling_qwen2.Qwen2RotaryEmbedding",
    f"{_IN}.qwen3.modeling_qwen3.Qwen3RotaryEmbedding",
)
def operate_on_rotary_embedding(module: Any, surgery: Surgery) -> None:
    parent_path = surgery.path.rpartition(".")[0]
    parent, path = surgery.model.get_submodule(parent_path), surgery.path

    def switch_off() -> None:
        """Only where it turns nothing but ALiBi layers: a vision tower or an encoder may have one as well."""
        served = {name: part for name, part in parent.named_modules() if hasattr(part, "alibi") or asks_by_name(part)}
        without = [name for name, part in served.items() if not isinstance(getattr(part, "alibi", None), AlibiHeads)]
        if len(without) == len(served):
            return
        if without:
            raise ValueError(
                f"{path} turns layers with ALiBi and without, among them {parent_path}.{without[0]}: apply_alibi to "
                "the part of the model that is to have it, or register_alibi the others"
            )
        frequencies = next(buffer for name, buffer in module.named_buffers() if name.endswith("inv_freq"))
        surgery.replace(module, NoRotation(2 * len(frequencies)))

    surgery.afterwards(switch_off)


def asks_by_name(module: nn.Module) -> bool:
    """Whether it is an attention layer that follows transformers' interface."""
    forward = inspect.unwrap(type(module).forward)
    return "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ())


def surgeon_by_structure(module: nn.Module) -> Surgeon | None:
    """For decoders that no surgeon is registered for: they ask for their attention by name, and turn by an embedding.

    Whatever else they do, the proof finds.
    """
    kind = type(module)
    if not kind.__module__.startswith("transformers.models."):
        return None
    has_frequencies = any(name.endswith("inv_freq") for name, _ in module.named_buffers())
    if kind.__name__.endswith("RotaryEmbedding") and has_frequencies:
        return operate_on_rotary_embedding
    if asks_by_name(module) and getattr(module, "is_causal", False) and hasattr(module, "layer_idx"):
        return operate_on_attention
    return None


def _check_windows_agree(module: Any, surgery: Surgery) -> None:
    """A layer's own window and its mask's, which the model makes by `config.layer_types`, must be the same."""
    config, index = module.config, module.layer_idx
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None or not hasattr(module, "sliding_window"):
        return
    slides = layer_types[index] == "sliding_attention"
    inclusive = 0 if module.is_causal else 1  # ModernBERT's config names the largest distance, its layers one more
    expected = config.sliding_window + inclusive if slides else None
    if layer_types[index] not in ("sliding_attention", "full_attention") or module.sliding_window != expected:
        raise ValueError(
            f"{surgery.path} must have the window of config.layer_types[{index}] {layer_types[index]!r}, {expected}, "
            f"got sliding_window {module.sliding_window}: make the layers and the config agree before apply_alibi"
        )
