"""Configs and slopes from the checkpoints of converted models."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from .alibi_layer import AlibiHeads, fill_slopes
from .configs import plain_entries, saved_records

_SLOPES = ".slopes"
_KEY = f".alibi{_SLOPES}"
#: Keyword arguments of from_pretrained that say where a checkpoint is.
_HUB = {"cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token"}
#: Keyword arguments of from_pretrained that a config would keep as its own.
_NOT_OF_CONFIGS = {"dtype", "torch_dtype", "quantization_config"}

#: The arguments of apply_alibi for the parts of a model. A part is named by the path of its config.
Records = dict[tuple[str, ...], dict[str, Any]]


def read_config(source: str | os.PathLike[str], options: Mapping[str, Any]) -> tuple[Any, Records, dict[str, Any]]:
    """Read the config of a converted model, which transformers refuses.

    Args:
        source: Folder or name of the checkpoint.
        options: Keyword arguments of `from_pretrained`. Those that name entries of the config replace these.

    Returns:
        The config without ALiBi, the arguments of `apply_alibi`, and the remaining options.
    """
    from transformers import CONFIG_MAPPING, PreTrainedConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    location = {name: value for name, value in options.items() if name in _HUB}
    saved, _ = PreTrainedConfig.get_config_dict(source, **location)
    records = saved_records(saved)
    if not records:
        raise ValueError(f"name_or_path must be a checkpoint of a model with ALiBi, got {str(source)!r}")
    entries = plain_entries(saved)
    code = entries.get("auto_map", {}).get("AutoConfig")
    if code is not None and options.get("trust_remote_code"):
        config_class: Any = get_class_from_dynamic_module(code, source, **location)
    else:
        config_class = CONFIG_MAPPING[entries["model_type"]]
    kept = {name: value for name, value in options.items() if name in _NOT_OF_CONFIGS}
    others = {name: value for name, value in options.items() if name not in _NOT_OF_CONFIGS}
    config, remaining = config_class.from_dict(entries, return_unused_kwargs=True, **others)
    return config, records, remaining | kept


def read_slopes(source: str | os.PathLike[str], options: Mapping[str, Any]) -> dict[str, tuple[Tensor, str]]:
    """The slopes in a checkpoint, and their files, by the names of the `AlibiHeads` modules.

    `from_pretrained` cannot load them into an unconverted model.
    """
    files = _weight_files(source, options)
    return {layer: (slopes, file) for file in files for layer, slopes in _slopes_in(file)}


def restore_slopes(model: nn.Module, saved: Mapping[str, tuple[Tensor, str]], prefix: str) -> None:
    """Fill the slopes of a model whose name in the saved model is `prefix`."""
    for path, module in model.named_modules(prefix=prefix):
        if isinstance(module, AlibiHeads):
            layer = _same_layer(path, saved)
            if layer is None:
                raise ValueError(f"the checkpoint must hold the slopes of {path}, got none")
            slopes, file = saved[layer]
            num_heads = len(module.initial)
            if slopes.shape != (num_heads,) or not slopes.isfinite().all():
                raise ValueError(
                    f"{layer}{_SLOPES} in {file!r} must be {num_heads} finite numbers, got {slopes.tolist()}"
                )
            fill_slopes(module.slopes, slopes)
            module.initial = tuple(slopes.tolist())


def _same_layer(path: str, saved: Collection[str]) -> str | None:
    """The saved name of a layer. Names may begin otherwise: with a head, or as an older version of a model has them."""

    def shared(name: str) -> int:
        pairs = zip(reversed(path.split(".")), reversed(name.split(".")), strict=False)
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))

    most = max(map(shared, saved), default=0)
    candidates = [name for name in saved if shared(name) == most]
    beginning = path.split(".")[: path.count(".") + 1 - most]
    has_number = any(part.isdigit() for part in beginning)  # of the layer
    return candidates[0] if len(candidates) == 1 and not has_number else None


def _slopes_in(file: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each `AlibiHeads` module in a file of weights, and its slopes."""
    from safetensors import safe_open
    from transformers.modeling_utils import load_state_dict

    if not file.endswith(".safetensors"):
        tensors = load_state_dict(file)
        yield from ((key.removesuffix(_SLOPES), tensors[key]) for key in tensors if key.endswith(_KEY))
        return
    with safe_open(file, "pt") as opened:  # reads only the slopes
        for key in opened.keys():  # noqa: SIM118  not a mapping
            if key.endswith(_KEY):
                yield key.removesuffix(_SLOPES), opened.get_tensor(key)


def _weight_files(source: str | os.PathLike[str], options: Mapping[str, Any]) -> list[str]:
    """The files that `from_pretrained` has loaded, chosen by transformers' own function. It has no public one."""
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    download: Any = {name: options.get(name) for name in ("revision", "cache_dir")}
    download |= {"subfolder": options.get("subfolder") or "", "local_files_only": True}
    files, _ = _get_resolved_checkpoint_files(
        source,
        variant=options.get("variant"),
        gguf_file=None,
        use_safetensors=options.get("use_safetensors"),
        user_agent=None,
        is_remote_code=True,  # no conversion on the hub
        transformers_explicit_filename=None,
        download_kwargs=download,
    )
    return list(files or [])
