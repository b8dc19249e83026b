"""The user's module inside what torch wraps around it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module inside torch.compile's or DistributedDataParallel's."""
    for attribute in ("_orig_mod", "module"):
        inner = getattr(model, attribute, None)
        if isinstance(inner, nn.Module) and type(model).__module__.startswith("torch."):
            return unwrapped(inner)
    return model


def signature(model: nn.Module) -> Mapping[str, inspect.Parameter]:
    """The parameters of `forward`, of the model inside any wrapper."""
    return inspect.signature(unwrapped(model).forward).parameters


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has a part in it."""
    return any(
        hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )
