"""Learned slopes that no optimizer trains."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .alibi_layer import AlibiHeads

#: Models with learned slopes, and the ids of the parameters of each optimizer that has stepped, by its id.
_watched: weakref.WeakKeyDictionary[nn.Module, dict[int, set[int]]] = weakref.WeakKeyDictionary()


def check_second_step(model: nn.Module) -> None:
    """Warn at the second step of the model's first optimizer if none that has stepped holds the learned slopes.

    An optimizer made before `apply_alibi` and not passed to it does not hold them. Training would run, and the slopes
    would stay as they are. By the second step of one optimizer the others have stepped, too.
    """
    _register()
    _watched[model] = {}


@functools.cache
def _register() -> None:
    register_optimizer_step_pre_hook(_check)  # once: torch cannot remove a hook while it runs


def _check(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for model, held_by in list(_watched.items()):
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if held.isdisjoint(map(id, model.parameters())):  # of another model
            continue
        if id(optimizer) in held_by:
            del _watched[model]
            _warn(model, set().union(*held_by.values()), optimizer)
        held_by[id(optimizer)] = held


def _warn(model: nn.Module, held: set[int], optimizer: Optimizer) -> None:
    heads = {name: part for name, part in model.named_modules() if isinstance(part, AlibiHeads) and part.learned}
    idle = [name for name, part in heads.items() if part.slopes.requires_grad and id(part.slopes) not in held]
    if idle:
        warnings.warn(
            f"{len(idle)} of {len(heads)} learned slopes are in no optimizer that has stepped, such as {idle[0]}: "
            f"pass {type(optimizer).__name__} to apply_alibi as optimizers, or make it afterwards",
            stacklevel=5,
        )
