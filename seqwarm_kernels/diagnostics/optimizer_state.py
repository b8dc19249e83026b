"""Where an optimizer keeps its moments, whoever wrote it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .quantised import dequantised, is_quantised_pair


class Pair(NamedTuple):
    """A parameter's first and second moment."""

    momentum: Tensor
    second_moment: Tensor
    are_copies: bool  #: they were made for this alone


def unwrapped_optimizer(optimizer: Any) -> Any:
    """The optimizer inside of those that wrap it, as Accelerate's does.

    Raises:
        TypeError: it is no optimizer.
        ValueError: it keeps this rank's part inside, as torch's ZeroRedundancyOptimizer does.
    """
    while _is_optimizer(getattr(optimizer, "optimizer", None)):
        optimizer = optimizer.optimizer
    if not _is_optimizer(optimizer):
        raise TypeError(f"optimizer must have param_groups and state, got {type(optimizer).__name__}")
    if _is_optimizer(getattr(optimizer, "optim", None)):
        raise ValueError(
            f"optimizer must hold the state of all its parameters, got {type(optimizer).__name__}, which holds this "
            "rank's part in .optim; pass that for the statistics of the part"
        )
    return optimizer


def _is_optimizer(value: object) -> bool:
    return hasattr(value, "param_groups") and hasattr(value, "state")


def parameters_of(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def check_optimizer(optimizer: Any) -> Any:
    """The optimizer inside, if it keeps a second moment, or will from its first step on.

    Raises:
        TypeError, ValueError: it is no optimizer, or keeps none. Some of other packages show that with their first
            step only: before it, they look like Adam.
    """
    inner = unwrapped_optimizer(optimizer)
    states = [state for parameter in parameters_of(inner) if (state := inner.state.get(parameter))]
    for state in states:
        if not _has_pair(state):
            raise _no_second_moment(inner, f"a parameter's state holds {', '.join(map(str, state))}")
    if not states and not all("betas" in group for group in inner.param_groups):
        raise _no_second_moment(inner, "no state, and groups without betas")
    if isinstance(inner, torch.optim.Adamax):
        raise _no_second_moment(inner, "which keeps the largest gradients in their place")
    return inner


def pair_of(state: Mapping[str, Any], optimizer: Any) -> Pair:
    """The moments in a parameter's state.

    Raises:
        ValueError: they are not there.
    """
    if "exp_avg_sq" in state and "exp_avg" in state:
        return Pair(state["exp_avg"], state["exp_avg_sq"], are_copies=False)
    if not _has_pair(state):
        raise _no_second_moment(optimizer, f"a parameter's state holds {', '.join(map(str, state))}")
    return Pair(dequantised(state, 1), dequantised(state, 2), are_copies=True)


def _has_pair(state: Mapping[str, Any]) -> bool:
    return ("exp_avg" in state and "exp_avg_sq" in state) or is_quantised_pair(state)


def _no_second_moment(optimizer: Any, found: str) -> ValueError:
    return ValueError(
        f"optimizer must keep exp_avg and exp_avg_sq for each parameter, as Adam does, got {type(optimizer).__name__} "
        f"({found})"
    )
