"""Slopes that were learned or given, from the checkpoints of converted models."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .alibi_layer import AlibiHeads, fill_slopes
from .configs import RECORD

_SLOPES = ".slopes"
_KEY = f".alibi{_SLOPES}"


def restore_slopes(model: nn.Module, record: dict[str, Any] | None, location: Mapping[str, Any]) -> None:
    """Load the slopes from the model's checkpoint, if they were learned or given.

    `from_pretrained` cannot load them into an unconverted model.

    Args:
        record: Arguments of `apply_alibi` saved in the model's config, see `configs.record_of`.
        location: Keyword arguments of `from_pretrained` that say which files to read: subfolder, variant, ...

    Raises:
        ValueError: The checkpoint does not have the slopes of a layer, or they do not fit.
    """
    if record is None or not record["own_slopes"]:
        return
    config: Any = model.config
    source = config._name_or_path
    files = _weight_files(source, location, getattr(config, "transformers_weights", None)) if source else []
    saved = {layer: (slopes, file) for file in files for layer, slopes in _slopes_in(file)}
    for path, module in model.named_modules():
        if isinstance(module, AlibiHeads):
            layer = next((layer for layer in saved if _is_same_layer(layer, path)), None)
            if layer is None:
                raise ValueError(
                    f"the config says that slopes were learned or given, but the checkpoint {source!r} has none for "
                    f"{path}: load the model from its checkpoint, pass slopes, or delete config.{RECORD} to start from "
                    "the default slopes"
                )
            slopes, file = saved[layer]
            num_heads = len(module.initial)
            if slopes.shape != (num_heads,) or not slopes.isfinite().all():
                raise ValueError(
                    f"{layer}{_SLOPES} in {file!r} must be {num_heads} finite numbers, one for each head, got "
                    f"{slopes.tolist()}"
                )
            fill_slopes(module.slopes, slopes)
            module.initial = tuple(slopes.tolist())


@contextmanager
def naming_damaged_weights(source: str | os.PathLike[str], location: Mapping[str, Any]) -> Iterator[None]:
    """Name the file if `from_pretrained` finds it damaged. safetensors' own error does not.

    Raises:
        ValueError: A file of weights cannot be read.
    """
    from safetensors import SafetensorError

    try:
        yield
    except SafetensorError as error:
        files = _weight_files(source, location)
        damaged = [file for file in files if file.endswith(".safetensors") and not _is_readable(file)]
        raise ValueError(
            f"name_or_path must be a checkpoint whose weights can be read, got {', '.join(damaged) or str(source)!r}: "
            f"{error}"
        ) from error


def _is_readable(file: str) -> bool:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt"):
            return True
    except SafetensorError:
        return False


def _is_same_layer(saved: str, path: str) -> bool:
    """Compare names of layers. In a model with a head the names have a prefix."""
    return saved == path or saved.endswith(f".{path}") or path.endswith(f".{saved}")


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


def _weight_files(
    source: str | os.PathLike[str], location: Mapping[str, Any], explicit_name: str | None = None
) -> list[str]:
    """The files that `from_pretrained` has loaded, chosen by transformers' own function. It has no public one.

    Args:
        source: Folder or name of the checkpoint.
        location: See `restore_slopes`.
        explicit_name: `transformers_weights` of the config.
    """
    from transformers.modeling_utils import _get_resolved_checkpoint_files

    download: Any = {name: location.get(name) for name in ("revision", "cache_dir")}
    download |= {"subfolder": location.get("subfolder") or "", "local_files_only": True}
    try:
        files, _ = _get_resolved_checkpoint_files(
            source,
            variant=location.get("variant"),
            gguf_file=None,
            use_safetensors=location.get("use_safetensors"),
            user_agent=None,
            is_remote_code=True,  # no conversion on the hub
            transformers_explicit_filename=explicit_name,
            download_kwargs=download,
        )
    except OSError:  # the config was not loaded with weights
        return []
    return list(files or [])
