"""Tensor parallelism of transformers: which layers of a model hold only a part of their heads on a rank."""

from __future__ import annotations

import re
from typing import Any

from torch import nn


def mesh_of_heads(model: nn.Module, path: str, attention: nn.Module) -> Any | None:
    """The DeviceMesh of the ranks that share the heads of a layer, or None if each rank has all of them.

    transformers' style "colwise" leaves each rank the outputs of its part of a projection. Other styles gather the
    outputs, and the rank attends with all heads.

    Args:
        model: The model that `from_pretrained` gave a plan of tensor parallelism, or any other.
        path: Name of the attention module in the model.
        attention: The attention module.
    """
    size = getattr(model, "tp_size", None) or 1
    mesh: Any = getattr(model, "_device_mesh", None)  # has no public name
    if size == 1 or mesh is None:
        return None
    plan: dict[str, str] = getattr(model, "tp_plan", None) or {}
    # Plans write layers.*.self_attn for layers.3.self_attn.
    rules = [plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", f"{path}.{name}")) for name, _ in attention.named_children()]
    if "colwise" not in rules:
        return None
    key_heads = getattr(getattr(attention, "config", None), "num_key_value_heads", None) or size
    if key_heads % size:
        raise ValueError(f"{path} must have a number of key heads that tp_size {size} divides, got {key_heads}")
    return mesh if mesh.ndim == 1 else mesh["tp"]
