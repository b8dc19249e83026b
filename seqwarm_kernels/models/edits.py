"""Changes to a model, its configuration and its optimizers that can be taken back."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

_MISSING = object()


class Edits:
    """Remembers how to undo each change; `undo` leaves everything as it was."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def undo(self) -> None:
        """All of them, latest first, even if one fails."""
        while self._undo:
            try:
                self._undo.pop()()
            except Exception as error:
                warnings.warn(f"a change could not be taken back: {error!r}", stacklevel=2)

    def on_undo(self, action: Callable[[], object]) -> None:
        """For a change made elsewhere."""
        self._undo.append(action)

    def assign(self, owner: Any, name: str, value: Any) -> None:
        """`owner.name = value`: attributes, methods, buffers, submodules, and `__class__`."""
        hides_method = name not in vars(owner) and inspect.isroutine(getattr(type(owner), name, None))
        old = _MISSING if hides_method else getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        self._undo.append(lambda: delattr(owner, name) if old is _MISSING else setattr(owner, name, old))

    def drop_parameters(self, optimizer: Optimizer, gone: set[int]) -> int:
        """Take the parameters with these ids out of their groups, with their state. Returns how many they were."""
        dropped = 0
        for group in optimizer.param_groups:
            kept = [index for index, parameter in enumerate(group["params"]) if id(parameter) not in gone]
            dropped += len(group["params"]) - len(kept)
            for name in ("params", "param_names"):  # the names stand beside the parameters where there are any
                if name in group and len(kept) < len(group[name]):
                    self._set_item(group, name, [group[name][index] for index in kept])
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in gone]:
            self._pop_item(optimizer.state, parameter)
        return dropped

    def add_parameters(self, optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        """In a group of their own, without weight decay, with the other options of the first group."""
        first = optimizer.param_groups[0]
        options = {name: value for name, value in first.items() if name not in ("params", "param_names")}
        group: dict[str, Any] = options | {"weight_decay": 0.0} if "weight_decay" in options else options
        named = "param_names" in first
        optimizer.add_param_group(group | {"params": list(parameters.items() if named else parameters.values())})
        self._undo.append(optimizer.param_groups.pop)

    def _set_item(self, mapping: Any, name: Any, value: Any) -> None:
        old = mapping[name]
        mapping[name] = value
        self._undo.append(lambda: mapping.__setitem__(name, old))

    def _pop_item(self, mapping: Any, name: Any) -> None:
        old = mapping.pop(name)
        self._undo.append(lambda: mapping.__setitem__(name, old))
