"""The configurations of Hugging Face models under surgery: what they run with, and what they save."""

from __future__ import annotations

from typing import Any

from torch import nn

from .alibi_layer import AlibiHeads
from .families.torch_nn import AlibiMultiheadAttention
from .surgery import Surgery
from .transformers_attention import NAME, check_call, refuse_packed

#: What a config saves: the arguments of apply_alibi, and whether slopes are the usual ones.
RECORD = "seqwarm_alibi"

#: Where model types keep their longest sequence, if not in max_position_embeddings.
_LENGTHS = {"bloom": "seq_length", "mpt": "max_seq_len"}
#: Their attention asks for none by name, and a plain reload of theirs must not either.
_OWN_ATTENTION = {"bloom", "mpt", "falcon"}


def prepare_configs(surgery: Surgery, before: dict[str, Any] | None) -> None:
    """Point the models that hold ALiBi layers to our attention and masks, and note the surgery in their configs.

    Args:
        before: the record of the checkpoint that the model comes from.
    """
    models = _pretrained_models(surgery.model)
    if not models:
        return
    were_learned = surgery.learn_slopes or (before is not None and before["slopes_were_learned"])
    record = {
        "max_seq_length": surgery.max_seq_length,
        "learn_slopes": surgery.learn_slopes,
        "slopes_were_learned": were_learned,
    }
    done: list[Any] = []
    for model in models:
        config = model.config
        for check in (check_call, refuse_packed) if config.model_type in _OWN_ATTENTION else (check_call,):
            surgery.edits.on_undo(model.register_forward_pre_hook(check, with_kwargs=True).remove)
        if any(config is other for other in done):
            continue
        done.append(config)
        _check_not_quantised(config)
        surgery.set(config, "_attn_implementation_internal", NAME)
        surgery.set(config, RECORD, record)
        if config.model_type not in _OWN_ATTENTION:
            surgery.set(config, "attn_implementation", NAME)  # saved: a plain reload cannot lose ALiBi in silence
        length = _LENGTHS.get(config.model_type, "max_position_embeddings")
        surgery.set(config, length, surgery.max_seq_length + _first_position(config))


def record_of(model: Any) -> dict[str, Any] | None:
    """What a config of this model says about a surgery, before it was saved."""
    records = (getattr(module.config, RECORD, None) for module in _with_configs(model))
    return next((record for record in records if record is not None), None)


def _pretrained_models(model: nn.Module) -> list[Any]:
    """Every Hugging Face model that holds an ALiBi layer which asks for its attention by name."""
    return [module for module in _with_configs(model) if any(_has_named_attention(part) for part in module.modules())]


def _with_configs(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if hasattr(getattr(module, "config", None), "_attn_implementation_internal")
        and hasattr(module, "save_pretrained")
    ]


def _has_named_attention(module: nn.Module) -> bool:
    heads = getattr(module, "alibi", None)
    return isinstance(heads, AlibiHeads) and not isinstance(module, AlibiMultiheadAttention)


def _check_not_quantised(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"config.quantization_config must be None, got {type(config.quantization_config).__name__}: apply_alibi to "
            "the model in floating point, train it, and quantise then"
        )


def _first_position(config: Any) -> int:
    """RoBERTa's positions start behind its padding token, and its config counts them all."""
    return config.pad_token_id + 1 if config.model_type == "roberta" else 0
