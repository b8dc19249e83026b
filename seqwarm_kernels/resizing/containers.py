"""Batches as nested containers: mappings and dataclasses that hold tensors and other values.

`flatten_batch` reads a batch as a flat mapping. A nested entry is named by its path: batch["encoder"]["input_ids"] is
called "encoder.input_ids".
"""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from .entry_names import own_name


def is_container(value: object) -> bool:
    """Whether `value` is a mapping or a dataclass."""
    return isinstance(value, Mapping) or (
        dataclasses.is_dataclass(value)
        and not isinstance(value, type)
        and not hasattr(value, "_tensordict")  # a tensorclass: a TensorDict wraps values in it that are not tensors
    )


def flatten_batch(batch: Any, prefix: str = "") -> dict[Any, Any]:
    """Every entry that is not a container, by path, in the order of the batch. Paths begin with `prefix`.

    Raises:
        TypeError: A container is neither a mutable mapping nor a dataclass.
    """
    if not prefix and _is_flat(batch):
        return batch
    entries: dict[Any, Any] = {}
    for _, path, value in _items(batch, prefix):
        entries |= flatten_batch(value, f"{path}.") if is_container(value) else {path: value}
    return entries


def _is_flat(batch: object) -> bool:
    """Whether `batch` is the usual one. The usual entries are not asked what they are, which takes microseconds."""
    usual = (Tensor, int, str, list)
    return type(batch) is dict and not any(type(value) not in usual and is_container(value) for value in batch.values())


def _items(container: Any, prefix: str) -> list[tuple[Any, Any, Any]]:
    """Name, path and value of each entry of a container."""
    if isinstance(container, MutableMapping):
        items = list(container.items())
    elif isinstance(container, Mapping) or not is_container(container):
        where = f"batch[{prefix[:-1]!r}]" if prefix else "batch"
        raise TypeError(f"{where} must be a mutable mapping or a dataclass, got {type(container).__name__}")
    else:
        items = [(field.name, getattr(container, field.name)) for field in dataclasses.fields(container)]
    return [(name, f"{prefix}{name}" if prefix else name, value) for name, value in items]


def flat_batches(batch: Any, keys: Collection[Any] | None, prefix: str = "") -> list[dict[Any, Any]]:
    """The entries by path of each batch in `batch`: usually one.

    Containers with tensors of the same names, as in {"a": {"input_ids": ...}, "b": {"input_ids": ...}}, are batches of
    their own, unless a tensor of tokens that is to be resized is beside them. Other entries beside them pass through.
    """
    if not prefix and _is_flat(batch):
        return [batch]
    entries = flatten_batch(batch, prefix)
    inner = [(f"{path}.", value) for _, path, value in _items(batch, prefix) if is_container(value)]
    of_tokens = [path for path, value in entries.items() if isinstance(value, Tensor) and value.dim() > 1]
    resized = {path for path in of_tokens if keys is None or path in keys}
    beside = [path for path in resized if not any(str(path).startswith(start) for start, _ in inner)]
    names = [{own_name(path) for path in of_tokens if str(path).startswith(start)} for start, _ in inner]
    if beside or sum(map(len, names)) == len(set[str]().union(*names)):
        return [entries]
    batches = [each for start, value in inner for each in flat_batches(value, keys, start)]
    return [each for each in batches if not resized.isdisjoint(each)] or [entries]


def cut_entries(batch: Any, resized: Any) -> Iterator[tuple[Any, Tensor, Tensor]]:
    """The tensors of a batch whose shape resizing has changed: path, before and after."""
    entries = flatten_batch(batch)
    for path, after in flatten_batch(resized).items():
        before = entries.get(path)
        if isinstance(after, Tensor) and isinstance(before, Tensor) and before.shape != after.shape:
            yield path, before, after


def unflatten_batch(batch: Any, new_entries: Mapping[Any, Any], removed: Collection[Any] = (), prefix: str = "") -> Any:
    """A batch of the same types with `new_entries` and without those that are `removed`. It is not changed.

    An entry of a new path is added to the container that holds the rest of its path.
    """
    if type(batch) is dict and not prefix and (batch.keys() >= new_entries.keys() or _is_flat(batch)):  # the usual one
        return {path: value for path, value in {**batch, **new_entries}.items() if path not in removed}
    items = _items(batch, prefix)
    paths = [str(path) for path in (*new_entries, *removed)]
    known = {path for _, path, _ in items}
    new = {
        path[len(prefix) :]: new_entries[path]
        for path in paths
        if path.rpartition(".")[0] == prefix[:-1] and path not in known and path not in removed
    }
    for name, path, value in items:
        if path in new_entries:
            new[name] = new_entries[path]
        elif is_container(value) and any(each.startswith(f"{path}.") for each in paths):
            new[name] = unflatten_batch(value, new_entries, removed, f"{path}.")
    return _copy_with(batch, new, [name for name, path, _ in items if path in removed])


def _copy_with(container: Any, new: dict[Any, Any], old: list[Any]) -> Any:
    """A copy with the entries in `new`, and without those named in `old`, which are None in a dataclass."""
    is_mapping = isinstance(container, MutableMapping)
    if type(container) is dict:  # torch.compile traces this, but not copy.copy
        return {name: value for name, value in {**container, **new}.items() if name not in old}
    if is_mapping and not isinstance(container, (dict, UserDict)):
        entries = {name: value for name, value in {**container, **new}.items() if name not in old}
        return type(container)(entries, **_tensordict_options(container, new))
    new_container = copy.copy(container)  # of dicts and dataclasses, keeps attributes
    if getattr(container, "__dict__", None) is container:  # its entries are its attributes
        new_container.__dict__ = new_container
    for name, value in (dict.fromkeys(old) | new).items():
        if is_mapping and name in old:
            del new_container[name]
        elif is_mapping:
            new_container[name] = value
        elif hasattr(new_container, name):
            object.__setattr__(new_container, name, value)  # a frozen dataclass refuses setattr
        else:
            raise TypeError(f"batch must be a mapping to get {name!r}, got {type(container).__name__}")
    return new_container


def _tensordict_options(container: Any, replaced: Mapping[Any, Any]) -> dict[str, Any]:
    """Arguments of TensorDict besides its entries. Its batch size has the first 0, 1, 2, ... sizes of its tensors."""
    batch_size = getattr(container, "batch_size", None)
    if not isinstance(batch_size, torch.Size):
        return {}
    sizes = [value.shape[: len(batch_size)] for value in replaced.values() if hasattr(value, "shape")]
    names = container.names if any(container.names) else None
    return {"batch_size": max(sizes, key=len, default=batch_size), "device": container.device, "names": names}
