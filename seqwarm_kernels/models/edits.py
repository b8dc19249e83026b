"""Changes to a model, its config and its optimizers that can be undone."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from .alibi_layer import fill_slopes

_MISSING = object()


class Edits:
    """Changes to a model, its config and its optimizers, with a log that `undo` reverts."""

    def __init__(self) -> None:
        self._log: list[Callable[[], object]] = []

    def undo(self) -> None:
        """Revert all changes, latest first."""
        while self._log:
            self._log.pop()()

    def on_undo(self, action: Callable[[], object]) -> None:
        """Add the reverse of a change that was made elsewhere."""
        self._log.append(action)

    def assign(self, owner: Any, name: str, value: Any) -> None:
        """Assign `owner.name = value`. The name may be an attribute, method, buffer, submodule, or `__class__`."""
        hides_method = name not in vars(owner) and inspect.isroutine(getattr(type(owner), name, None))
        old = _MISSING if hides_method else getattr(owner, name, _MISSING)
        setattr(owner, name, value)
        self._log.append(lambda: delattr(owner, name) if old is _MISSING else setattr(owner, name, old))

    def fill(self, tensor: Tensor, values: Tensor) -> None:
        """Copy values into slopes."""
        old = tensor.detach().clone()
        fill_slopes(tensor, values)
        self._log.append(lambda: tensor.detach().copy_(old))

    def drop_parameters(self, optimizer: Optimizer, gone: set[int]) -> int:
        """Remove the parameters with these ids from the optimizer's groups and state. Return how many there were."""
        dropped = 0
        for group in optimizer.param_groups:
            kept = [index for index, parameter in enumerate(group["params"]) if id(parameter) not in gone]
            dropped += len(group["params"]) - len(kept)
            for name in ("params", "param_names"):  # a group of named parameters has a list of names, too
                if name in group and len(kept) < len(group[name]):
                    self.set_item(group, name, [group[name][index] for index in kept])
        for parameter in [parameter for parameter in optimizer.state if id(parameter) in gone]:
            state = optimizer.state.pop(parameter)
            self._log.append(functools.partial(optimizer.state.__setitem__, parameter, state))
        return dropped

    def add_parameters(self, optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> None:
        """Add a parameter group without weight decay. Its other options are those of the first group."""
        first = optimizer.param_groups[0]
        options = {name: value for name, value in first.items() if name not in ("params", "param_names")}
        group: dict[str, Any] = options | {"weight_decay": 0.0} if "weight_decay" in options else options
        named = "param_names" in first
        optimizer.add_param_group(group | {"params": list(parameters.items() if named else parameters.values())})
        self._log.append(optimizer.param_groups.pop)

    def set_item(self, mapping: Any, name: Any, value: Any) -> None:
        """Assign `mapping[name] = value`."""
        old = mapping.get(name, _MISSING)
        mapping[name] = value
        self._log.append(lambda: mapping.pop(name) if old is _MISSING else mapping.__setitem__(name, old))
