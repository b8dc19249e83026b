"""The configs of converted Hugging Face models: what they select in a forward, and what they save."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

from torch import nn

from ..utils.modules import is_pretrained
from .alibi_layer import AlibiHeads
from .families.learned import first_position
from .families.torch_nn import AlibiMultiheadAttention
from .surgery import Surgery
from .transformers_attention import DROPS_KEYWORDS, NAME, check_call, pass_packed, refuse_packed, register

#: Config entry with the arguments of apply_alibi.
RECORD = "seqwarm_alibi"

#: How the model type and the hidden size end in a saved config. Auto classes do not know such a type, and no model can
#: be made with such a size. A Trainer that resumes reads both without use.
SUFFIX = " with ALiBi"

#: Config entry of the longest sequence, if it is not max_position_embeddings.
_LENGTHS = {"bloom": "seq_length", "mpt": "max_seq_len"}
#: Their attention is not looked up by name.
_OWN_ATTENTION = {"bloom", "mpt", "falcon"}


def prepare_configs(surgery: Surgery) -> None:
    """Give the model configs of its own, which select our attention and masks, and which save that it has ALiBi.

    Models made from one config share it, so it is copied. The model may also be a part of another, whose config holds
    the original: the original, too, saves that this part has ALiBi.
    """
    modules = surgery.model.modules()
    models: list[Any] = [module for module in modules if is_pretrained(module) and _holds(module, _has_alibi)]
    if not models:
        return
    register()
    record: dict[str, Any] = {}
    if _saves_alibi(models[0].config):
        record = getattr(models[0].config, RECORD)
    elif models[0] is surgery.model:
        original = models[0].config
        surgery.set(original, RECORD, record)
        _save_as(_SavesAlibiAnywhere if models[0].base_model is models[0] else _SavesAlibiInside, original, surgery)
    surgery.edits.set_item(record, "max_seq_length", surgery.max_seq_length)
    surgery.edits.set_item(record, "learn_slopes", surgery.learn_slopes)
    _copy_configs(surgery)
    for model in models:
        if _holds(model, _has_named_attention):
            surgery.add_hook(model, check_call)
            lacks_packing = model.config.model_type in _OWN_ATTENTION | DROPS_KEYWORDS
            surgery.add_hook(model, refuse_packed if lacks_packing else pass_packed)
        first = first_position(model) if model.config.model_type == "roberta" else 0  # not if it only holds a RoBERTa
        length = _LENGTHS.get(model.config.model_type, "max_position_embeddings")
        surgery.set(model.config, length, surgery.max_seq_length + first)
        surgery.set(model.config, RECORD, record)
        _save_as(_SavesAlibi, model.config, surgery)
    for module in surgery.model.modules():  # layers may hold another config than their model
        if "config" in dict(_configs_of(module)) and _holds(module, _has_named_attention):
            # Private: the property `_attn_implementation` also sets the configs of parts, which may have no ALiBi.
            surgery.set(module.config, "_attn_implementation_internal", NAME)


def saved_records(entries: dict[str, Any]) -> dict[tuple[str, ...], dict[str, Any]]:
    """The arguments of `apply_alibi` in a saved config, by the paths of the configs that hold them.

    The path of the model itself is (), that of a converted decoder in an encoder-decoder is ("decoder",).
    """
    if RECORD in entries:
        return {(): entries[RECORD]}
    parts = {name: saved_records(part) for name, part in entries.items() if isinstance(part, dict)}
    return {(name, *path): record for name, records in parts.items() for path, record in records.items()}


def plain_entries(entry: Any) -> Any:
    """The entries of a saved config as they were without ALiBi."""
    if isinstance(entry, dict):
        return {name: plain_entries(part) for name, part in entry.items() if name != RECORD}
    if isinstance(entry, str) and entry.endswith(SUFFIX):
        text = entry.removesuffix(SUFFIX)
        return int(text) if text.isdigit() else text
    return entry


def part_with_config(model: nn.Module, path: tuple[str, ...]) -> tuple[str, nn.Module]:
    """The part of a model, and its name, whose config is at this path in the model's config."""
    config = functools.reduce(getattr, path, model.config)
    return next((name, part) for name, part in model.named_modules() if getattr(part, "config", None) is config)


class _SavesAlibi:
    """Config of a converted model. What it saves is marked; `to_dict`, in which PEFT reads the model type, is not."""

    def to_diff_dict(self) -> dict[str, Any]:
        return _marked(self, super().to_diff_dict())  # type: ignore[misc]

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, type(self).__bases__, vars(self)


class _SavesAlibiInside(_SavesAlibi):
    """Config of which a converted model has a copy. It is marked where a config around it saves it, by `to_dict`."""

    def to_dict(self) -> dict[str, Any]:
        return _marked(self, super().to_dict())  # type: ignore[misc]

    def to_diff_dict(self) -> dict[str, Any]:
        return plain_entries(super(_SavesAlibi, self).to_diff_dict())  # type: ignore[misc]


class _SavesAlibiAnywhere(_SavesAlibiInside):
    """As `_SavesAlibiInside`, for a model without a head: a model with one around it has the same config."""

    def to_diff_dict(self) -> dict[str, Any]:
        return super(_SavesAlibi, self).to_diff_dict()  # type: ignore[misc]


@functools.cache
def _saving(kind: type, mixin: type) -> type:
    """A subclass of a class of configs. It has the same name, by which Auto classes look up models."""
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


def _save_as(mixin: type, config: Any, surgery: Surgery) -> None:
    kind = type(config)
    surgery.set(config, "__class__", _saving(kind.__bases__[1] if issubclass(kind, _SavesAlibi) else kind, mixin))


def _rebuilt(mixin: type, kind: type) -> Any:
    return object.__new__(_saving(kind, mixin))


def _marked(config: Any, entries: dict[str, Any]) -> dict[str, Any]:
    names = "model_type", config.attribute_map.get("hidden_size", "hidden_size")
    marked = {name: f"{entries[name]}{SUFFIX}" for name in names if _is_plain(entries.get(name))}
    parts = {name: part for name, part in vars(config).items() if isinstance(entries.get(name), dict)}
    marked |= {name: _marked(part, entries[name]) for name, part in parts.items() if hasattr(part, "attribute_map")}
    return entries | marked


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, (int, str)) and not str(entry).endswith(SUFFIX)


def _copy_configs(surgery: Surgery) -> None:
    """Copy the configs of a model that is not converted yet, and let all its modules hold the copies."""
    copies: dict[int, Any] = {}  # of deepcopy: a config inside another is copied once
    for module in surgery.model.modules():
        for name, config in _configs_of(module):
            if not _saves_alibi(config):
                surgery.set(module, name, copy.deepcopy(config, copies))


def _saves_alibi(config: Any) -> bool:
    """Whether this is the config of a converted model itself."""
    return isinstance(config, _SavesAlibi) and not isinstance(config, _SavesAlibiInside)


def _configs_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    from transformers import PreTrainedConfig

    values = list(vars(module).items())
    return ((name, value) for name, value in values if isinstance(value, PreTrainedConfig))


def _holds(module: nn.Module, kind: Any) -> bool:
    return any(kind(part) for part in module.modules())


def _has_alibi(module: nn.Module) -> bool:
    return isinstance(getattr(module, "alibi", None), AlibiHeads)


def _has_named_attention(module: nn.Module) -> bool:
    return _has_alibi(module) and not isinstance(module, AlibiMultiheadAttention)
