"""Models under surgery from their checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .alibi_layer import AlibiHeads
from .configs import RECORD

_KEY = ".alibi.slopes"


def restore_slopes(model: nn.Module, record: dict[str, Any] | None) -> None:
    """Learned slopes of the checkpoint that the model was loaded from, which `from_pretrained` could not place.

    Args:
        record: what the model's config says about its surgery before it was saved.

    Raises:
        ValueError: slopes were learned, and are not to be found.
    """
    if record is None or not record["slopes_were_learned"]:
        return
    config: Any = model.config
    source = config._name_or_path
    saved = {_layer(key): slopes for key, slopes in _saved_slopes(source)}
    for path, module in model.named_modules():
        if isinstance(module, AlibiHeads):
            slopes = next((slopes for layer, slopes in saved.items() if _is_same(layer, path)), None)
            if slopes is None:
                raise ValueError(
                    f"the config says that slopes were learned, but the checkpoint {source!r} has none for {path}: "
                    f"load the model from its checkpoint, or delete config.{RECORD} to start from the usual slopes"
                )
            with torch.no_grad():
                module.slopes.copy_(slopes)


def _layer(key: str) -> str:
    return key.removesuffix(".slopes")


def _is_same(saved: str, path: str) -> bool:
    """A model with a head calls its layers by a longer name than the model without."""
    return saved == path or saved.endswith(f".{path}") or path.endswith(f".{saved}")


def _saved_slopes(source: str) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    for file in _weight_files(source):
        with safe_open(file, "pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  it is no mapping
                if key.endswith(_KEY):
                    yield key, tensors.get_tensor(key)


def _weight_files(source: str) -> list[Path]:
    """Of a folder, or of what `from_pretrained` has in its cache."""
    from transformers.utils import cached_file

    folder = Path(source)
    if not source:  # a model that was not loaded
        return []
    if not folder.is_dir():
        names = ("config.json", "model.safetensors", "model.safetensors.index.json")
        files = [
            cached_file(source, name, local_files_only=True, _raise_exceptions_for_missing_entries=False)
            for name in names
        ]
        folder = next((Path(file).parent for file in files if file is not None), folder)
    return sorted(folder.glob("*.safetensors"))
