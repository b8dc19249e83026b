"""Slopes that were learned or given, from the checkpoints of converted models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .alibi_layer import AlibiHeads, fill_slopes
from .configs import RECORD

_SLOPES = ".slopes"


def restore_slopes(model: nn.Module, record: dict[str, Any] | None, location: Mapping[str, Any]) -> None:
    """Load the slopes from the model's checkpoint, if they were learned or given.

    `from_pretrained` cannot load them into an unconverted model.

    Args:
        record: Arguments of `apply_alibi` saved in the model's config, see `configs.record_of`.
        location: Keyword arguments of `from_pretrained` that say where the checkpoint is: subfolder, revision, ...

    Raises:
        ValueError: The checkpoint does not have the slopes of a layer.
    """
    if record is None or not record["own_slopes"]:
        return
    config: Any = model.config
    source = config._name_or_path
    saved = dict(_saved_slopes(source, location))
    for path, module in model.named_modules():
        if isinstance(module, AlibiHeads):
            slopes = next((slopes for layer, slopes in saved.items() if _is_same_layer(layer, path)), None)
            if slopes is None:
                raise ValueError(
                    f"the config says that slopes were learned or given, but the checkpoint {source!r} has none for "
                    f"{path}: load the model from its checkpoint, pass slopes, or delete config.{RECORD} to start from "
                    "the default slopes"
                )
            fill_slopes(module.slopes, slopes)
            module.initial = tuple(slopes.tolist())


def _is_same_layer(saved: str, path: str) -> bool:
    """Compare names of layers. In a model with a head the names have a prefix."""
    return saved == path or saved.endswith(f".{path}") or path.endswith(f".{saved}")


def _saved_slopes(source: str, location: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name of each `AlibiHeads` module in the checkpoint, and its slopes."""
    from safetensors import safe_open

    for file in _weight_files(source, location):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  not a mapping
                if key.endswith(f".alibi{_SLOPES}"):
                    yield key.removesuffix(_SLOPES), tensors.get_tensor(key)


def _weight_files(source: str, location: Mapping[str, Any]) -> list[Path]:
    """Return the weight files of a local folder, or of a checkpoint in the cache of `from_pretrained`."""
    from transformers.utils import cached_file

    folder = Path(source) / (location.get("subfolder") or "")
    if not source:  # the model was not loaded from a checkpoint
        return []
    if not Path(source).is_dir():
        names = ("config.json", "model.safetensors", "model.safetensors.index.json")
        files = [
            cached_file(source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False, **location)
            for name in names
        ]
        folder = next((Path(file).parent for file in files if file is not None), folder)
    return sorted(folder.glob("*.safetensors"))
