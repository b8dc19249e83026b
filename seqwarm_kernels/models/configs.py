"""The configs of converted Hugging Face models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..utils.checks import check_bool
from .alibi_layer import AlibiHeads
from .families.learned import first_position
from .families.torch_nn import AlibiMultiheadAttention
from .surgery import Surgery, check_max_seq_length
from .transformers_attention import NAME, check_call, drops_keywords, pass_packed, refuse_packed

#: Config entry with the arguments of apply_alibi, and whether the slopes were ever learned or the user's own.
RECORD = "seqwarm_alibi"

_ENTRIES = {"max_seq_length", "learn_slopes", "own_slopes"}

#: Saved as `experts_implementation`. transformers refuses values that it does not know, in models without experts too,
#: and quotes them. A plain reload with another attention, which would be without ALiBi, is therefore an error.
REFUSED = "needs seqwarm_kernels.load_alibi_model"

#: Config entry of the longest sequence, if it is not max_position_embeddings.
_LENGTHS = {"bloom": "seq_length", "mpt": "max_seq_len"}
#: Their attention is not looked up by name.
_OWN_ATTENTION = {"bloom", "mpt", "falcon"}


def prepare_configs(surgery: Surgery, before: dict[str, Any] | None, *, own_slopes: bool) -> None:
    """Select our attention and masks in the models that hold ALiBi layers, and save the arguments in their configs.

    Args:
        before: `record_of` the model before the conversion.
        own_slopes: Whether the slopes are learned or the user's own, in this call.

    Raises:
        ValueError: A config asks for quantization.
    """
    models = _pretrained_models(surgery.model)
    if not models:
        return
    own_slopes = own_slopes or (before is not None and before["own_slopes"])
    record = {
        "max_seq_length": surgery.max_seq_length,
        "learn_slopes": surgery.learn_slopes,
        "own_slopes": own_slopes,
    }
    done: list[Any] = []
    for model in models:
        config = model.config
        surgery.add_hook(model, check_call)
        if config.model_type in _OWN_ATTENTION or drops_keywords(model):
            surgery.add_hook(model, refuse_packed)
        elif _is_causal(model):
            surgery.add_hook(model, pass_packed)
        if any(config is other for other in done):
            continue
        done.append(config)
        _check_not_quantized(config)
        surgery.set(config, "_attn_implementation_internal", NAME)
        surgery.set(config, RECORD, record)
        if not _is_right_without_conversion(config, own_slopes):  # saved, so that a plain reload is refused
            surgery.set(config, "experts_implementation", REFUSED)
            if config.model_type not in _OWN_ATTENTION:
                surgery.set(config, "attn_implementation", NAME)
        length = _LENGTHS.get(config.model_type, "max_position_embeddings")
        first = first_position(model) if config.model_type == "roberta" else 0  # not for a model that holds a RoBERTa
        surgery.set(config, length, surgery.max_seq_length + first)


def record_of(model: Any) -> dict[str, Any] | None:
    """Return the arguments of `apply_alibi` that a config of the model holds, or None if the model is not converted.

    Raises:
        ValueError: The record is not one that this version writes.
    """
    records = (getattr(module.config, RECORD, None) for module in _with_configs(model))
    record: dict[str, Any] | None = next((record for record in records if record is not None), None)
    if record is not None:
        _check_record(record)
    return record


def _check_record(record: Any) -> None:
    if not isinstance(record, Mapping) or record.keys() != _ENTRIES:
        got = ", ".join(sorted(map(str, record))) if isinstance(record, Mapping) else repr(record)
        raise ValueError(
            f"{RECORD} in the model's config must hold {', '.join(sorted(_ENTRIES))}, got {got}: another version of "
            "seqwarm_kernels wrote the checkpoint, or the config was edited"
        )
    try:
        check_max_seq_length(f"{RECORD}.max_seq_length in the model's config", record["max_seq_length"])
        for name in ("learn_slopes", "own_slopes"):
            check_bool(f"{RECORD}.{name} in the model's config", record[name])
    except TypeError as error:  # of the file, not of an argument
        raise ValueError(str(error)) from None


def _pretrained_models(model: nn.Module) -> list[Any]:
    """Return every Hugging Face model that holds an ALiBi layer whose attention is looked up by name."""
    return [module for module in _with_configs(model) if any(_has_named_attention(part) for part in module.modules())]


def _is_causal(model: nn.Module) -> bool:
    return all(part.causal for part in model.modules() if isinstance(part, AlibiHeads))


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


def _is_right_without_conversion(config: Any, own_slopes: bool) -> bool:
    """Return whether the model has the same slopes by its own code."""
    if config.model_type not in _OWN_ATTENTION or own_slopes:
        return False
    return config.model_type != "falcon" or config.alibi


def _check_not_quantized(config: Any) -> None:
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"config.quantization_config must be None, got {type(config.quantization_config).__name__}: apply_alibi to "
            "the model in floating point, train it, and quantize then"
        )
