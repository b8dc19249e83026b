"""Finds optimizers of a model that were not passed to `apply_alibi`."""

from __future__ import annotations

import gc
import sys
import warnings
from collections import Counter
from collections.abc import Mapping

from torch import nn
from torch.optim import Optimizer


def are_held_elsewhere(model: nn.Module) -> bool:
    """Whether something besides the model may hold one of its parameters, as optimizers do.

    Takes microseconds, where the search for optimizers takes a tenth of a second.
    """
    (alone,) = _references_outside(nn.PReLU())  # whose parameter takes no random number
    return any(count > alone for count in _references_outside(model))


def _references_outside(model: nn.Module) -> list[int]:
    """For each parameter, the references besides those of the modules that it is in."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    return [sys.getrefcount(parameter) - uses[id(parameter)] for parameter in model.parameters()]


def warn_of_unpassed_optimizers(before: Mapping[str, nn.Parameter], after: Mapping[str, nn.Parameter]) -> None:
    """Warn if an optimizer holds parameters that left the model, or if optimizers do not hold its new slopes.

    Args:
        before: Parameters of the model before the conversion.
        after: Its parameters after the conversion and the update of the optimizers that were passed.
    """
    removed, new = _not_in(before, after), _not_in(after, before)
    if not removed and not new:
        return
    optimizers = _optimizers_of(before)
    holders = [optimizer for optimizer in optimizers if _holds(optimizer, removed)]
    if holders:
        _warn(holders[0], f"keeps {', '.join(removed)}, which the model no longer has")
    elif new and optimizers and not any(_holds(optimizer, new) for optimizer in optimizers):
        _warn(optimizers[0], "does not train the learned slopes")


def _warn(optimizer: Optimizer, problem: str) -> None:
    warnings.warn(
        f"an optimizer of the model ({type(optimizer).__name__}) was made before apply_alibi and {problem}: pass it in "
        "optimizers, or make it again after apply_alibi",
        stacklevel=5,
    )


def _not_in(parameters: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    known = {id(parameter) for parameter in others.values()}
    return {name: parameter for name, parameter in parameters.items() if id(parameter) not in known}


def _optimizers_of(parameters: Mapping[str, nn.Parameter]) -> list[Optimizer]:
    """All optimizers that hold at least one of the parameters."""
    optimizers: list[Optimizer] = [value for value in gc.get_objects() if issubclass(type(value), Optimizer)]
    return [optimizer for optimizer in optimizers if _holds(optimizer, parameters)]


def _holds(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> bool:
    """Whether one of the parameters is in the optimizer's own groups. A wrapper may have no groups of its own."""
    wanted = {id(parameter) for parameter in parameters.values()}
    groups = vars(optimizer).get("param_groups", ())
    return any(id(parameter) in wanted for group in groups for parameter in group["params"])
