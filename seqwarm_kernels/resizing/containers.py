"""Batches as nested containers: mappings and dataclasses that hold tensors and other values.

`flatten_batch` reads a batch as a flat mapping. A nested entry is named by its path: batch["encoder"]["input_ids"] is
called "encoder.input_ids".
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor


def is_container(value: object) -> bool:
    """Whether `value` is a mapping or a dataclass."""
    return isinstance(value, Mapping) or (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not hasattr(value, "_tensordict")  # a tensorclass: a TensorDict wraps values in it that are not tensors
    )


def flatten_batch(batch: Any) -> dict[Any, Any]:
    """Every entry that is not a container, by path, in the order of the batch.

    Raises:
        TypeError: A container is neither a mutable mapping nor a dataclass.
        ValueError: Two entries have the same path.
    """
    if type(batch) is dict and not any(type(value) is not Tensor and is_container(value) for value in batch.values()):
        return batch
    entries: dict[Any, Any] = {}
    for path, value in _walk(batch, ""):
        if path in entries:
            raise ValueError(f"batch holds two entries that are called {path!r}; rename one of them")
        entries[path] = value
    return entries


def _walk(batch: Any, prefix: str) -> Iterator[tuple[Any, Any]]:
    for name, value in _items(batch, prefix):
        path = f"{prefix}{name}" if prefix else name
        if is_container(value):
            yield from _walk(value, f"{path}.")
        else:
            yield path, value


def _items(container: Any, prefix: str) -> list[tuple[Any, Any]]:
    if hasattr(container, "tensordicts") and hasattr(container, "stack_dim"):  # a lazy stack of TensorDict's package
        raise TypeError(
            f"batch must not be or hold a {type(container).__name__}, whose tensors are not in one memory: pass its "
            ".contiguous()"
        )
    if isinstance(container, MutableMapping):
        return list(container.items())
    if isinstance(container, Mapping) or not is_container(container):
        where = f"batch[{prefix[:-1]!r}]" if prefix else "batch"
        raise TypeError(
            f"{where} must be a mutable mapping of names to tensors, or a dataclass, got {type(container).__name__}"
            + (': name its tensors, {"input_ids": ..., "labels": ...}' if isinstance(container, (tuple, list)) else "")
        )
    return [(field.name, getattr(container, field.name)) for field in dataclasses.fields(container)]


def cut_entries(batch: Any, resized: Any) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """The tensors of a batch whose shape resizing has changed: path, before and after."""
    entries = flatten_batch(batch)
    for path, after in flatten_batch(resized).items():
        before = entries.get(path)
        if isinstance(after, Tensor) and isinstance(before, Tensor) and before.shape != after.shape:
            yield path, before, after


def unflatten_batch(batch: Any, new_entries: Mapping[Any, Any], sizes: tuple[int, int]) -> Any:
    """A batch of the same types in which `new_entries` replace the entries of the same paths.

    Args:
        batch: The batch that was flattened. It is not changed.
        new_entries: New values by path.
        sizes: The first two sizes of the new tensors.
    """
    if type(batch) is dict and batch.keys() >= new_entries.keys():  # the usual batch
        return {**batch, **new_entries}
    return _with_new_entries(batch, new_entries, sizes, "")


def _with_new_entries(container: Any, new_entries: Mapping[Any, Any], sizes: tuple[int, int], prefix: str) -> Any:
    """A container of the same type, with the new entries whose paths begin with `prefix`."""
    replaced = {}
    for name, value in _items(container, prefix):
        path = f"{prefix}{name}" if prefix else name
        if path in new_entries:
            replaced[name] = new_entries[path]
        elif is_container(value) and any(str(entry).startswith(f"{path}.") for entry in new_entries):
            replaced[name] = _with_new_entries(value, new_entries, sizes, f"{path}.")
    return _copy_with(container, replaced, sizes)


def _copy_with(container: Any, replaced: dict[Any, Any], sizes: tuple[int, int]) -> Any:
    if type(container) is dict:  # torch.compile traces this, but not copy.copy
        return {**container, **replaced}
    if isinstance(container, (dict, UserDict)):  # their copies keep attributes and share no storage
        new_container = copy.copy(container)
        if getattr(container, "__dict__", None) is container:  # its entries are its attributes
            new_container.__dict__ = new_container  # type: ignore[assignment]  # a dict
        for name, value in replaced.items():
            new_container[name] = value
        return new_container
    if isinstance(container, MutableMapping):
        options = _tensordict_options(container, sizes)
        try:
            return type(container)({**container, **replaced}, **options)  # type: ignore[call-arg]
        except TypeError as error:
            raise TypeError(
                "batch must be a mapping whose class takes a mapping of its entries, as dict does, got a "
                f"{type(container).__name__}: {error}"
            ) from error
    new_container = copy.copy(container)
    for name, value in replaced.items():
        object.__setattr__(new_container, name, value)  # a frozen dataclass refuses setattr
    return new_container


def _tensordict_options(container: Any, sizes: tuple[int, int]) -> dict[str, Any]:
    """Arguments of TensorDict besides its entries. Its batch size has the first 0, 1, 2, ... sizes of its tensors."""
    batch_size = getattr(container, "batch_size", None)
    if not isinstance(batch_size, torch.Size):
        return {}
    new_size = torch.Size([*sizes[: len(batch_size)], *batch_size[len(sizes) :]])
    names = container.names if any(container.names) else None
    return {"batch_size": new_size, "device": container.device, "names": names}
