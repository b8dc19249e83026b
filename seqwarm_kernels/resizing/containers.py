"""Batches as they come: mappings and dataclasses of tensors and other things, one inside another.

A batch is read as its *leaves*, what is no container itself, by path: the leaf batch["encoder"]["input_ids"] is
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
    return isinstance(value, Mapping) or (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not hasattr(value, "_tensordict")  # a tensorclass: what a TensorDict keeps things in that are no tensors
    )


def leaves(batch: Any) -> dict[Any, Any]:
    """Every leaf by its path, in the order of the batch.

    Raises:
        TypeError: a container is neither a mutable mapping nor a dataclass.
        ValueError: two leaves have one path.
    """
    if type(batch) is dict and not any(type(value) is not Tensor and is_container(value) for value in batch.values()):
        return batch
    found: dict[Any, Any] = {}
    for path, value in _walk(batch, ""):
        if path in found:
            raise ValueError(f"batch holds two entries that are called {path!r}; rename one of them")
        found[path] = value
    return found


def _walk(batch: Any, prefix: str) -> Iterator[tuple[Any, Any]]:
    for name, value in _items(batch, prefix):
        path = f"{prefix}{name}" if prefix else name
        if is_container(value):
            yield from _walk(value, f"{path}.")
        else:
            yield path, value


def _items(container: Any, prefix: str) -> list[tuple[Any, Any]]:
    if isinstance(container, MutableMapping):
        return list(container.items())
    if isinstance(container, Mapping) or not is_container(container):
        where = f"batch[{prefix[:-1]!r}]" if prefix else "batch"
        raise TypeError(
            f"{where} must be a mutable mapping of names to tensors, or a dataclass, got {type(container).__name__}"
        )
    return [(field.name, getattr(container, field.name)) for field in dataclasses.fields(container)]


def replaced(batch: Any, new_leaves: Mapping[Any, Any], sizes: tuple[int, int], prefix: str = "") -> Any:
    """A batch of the same types with these leaves in the places of its own; `sizes` are its rows and their length."""
    if type(batch) is dict and not prefix and batch.keys() >= new_leaves.keys():  # the usual batch
        return {**batch, **new_leaves}
    entries = {}
    for name, value in _items(batch, prefix):
        path = f"{prefix}{name}" if prefix else name
        if path in new_leaves:
            entries[name] = new_leaves[path]
        elif is_container(value) and any(str(leaf).startswith(f"{path}.") for leaf in new_leaves):
            entries[name] = replaced(value, new_leaves, sizes, f"{path}.")
    return _with_entries(batch, entries, sizes)


def _with_entries(batch: Any, entries: dict[Any, Any], sizes: tuple[int, int]) -> Any:
    """A container of the batch's type with these entries replaced."""
    if type(batch) is dict:  # torch.compile traces this, but not copy.copy
        return {**batch, **entries}
    if isinstance(batch, (dict, UserDict)):  # their copies keep attributes and share no storage
        new_batch = copy.copy(batch)
        for name, value in entries.items():
            new_batch[name] = value
        return new_batch
    if isinstance(batch, MutableMapping):
        return type(batch)({**batch, **entries}, **_own_options(batch, sizes))  # type: ignore[call-arg]
    new_batch = copy.copy(batch)
    for name, value in entries.items():
        object.__setattr__(new_batch, name, value)  # a frozen dataclass refuses setattr
    return new_batch


def _own_options(batch: Any, sizes: tuple[int, int]) -> dict[str, Any]:
    """A TensorDict's: it checks its tensors against a batch size, of none, its rows, or its rows and their length."""
    batch_size = getattr(batch, "batch_size", None)
    if not isinstance(batch_size, torch.Size):
        return {}
    new_size = torch.Size([*sizes[: len(batch_size)], *batch_size[len(sizes) :]])
    return {"batch_size": new_size, "device": batch.device, "names": batch.names if any(batch.names) else None}
