"""Checks of the arguments of attention on many devices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..utils.checks import check_int
from .parts import Shard


def check_mesh(mesh: object) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}")
    if mesh.ndim != 1:
        raise ValueError(f"mesh must have one dimension, such as device_mesh['context'], got {mesh.ndim} dimensions")
    if not torch.compiler.is_compiling() and mesh.mesh.tolist() != sorted(mesh.mesh.tolist()):
        raise ValueError(f"mesh must have its ranks in ascending order, got {mesh.mesh.tolist()}")


def check_local(name: str, tensor: object) -> None:
    """`tensor` must not be a DTensor."""
    if isinstance(tensor, Tensor) and hasattr(tensor, "placements"):
        raise TypeError(f"{name} must be the tensor of this rank, got a DTensor: pass {name}.to_local()")


def check_same_length(query: Tensor, key: Tensor, dimension: int) -> None:
    if query.shape[dimension] != key.shape[dimension]:
        raise ValueError(
            f"key must hold the tokens of query, {query.shape[dimension]}, got {key.shape[dimension]} tokens"
        )


def check_halo(halo: object) -> int | list[int] | None:
    """Return the width, or one for each key head."""
    if halo is None:
        return None
    if not isinstance(halo, Sequence):
        return check_int("halo", halo, minimum=0)
    return [check_int("halo", width, minimum=0) for width in halo]


def check_halo_of_heads(halo: object, key_heads: int) -> list[int] | None:
    """Return one width for each key head, or None."""
    checked = check_halo(halo)
    if checked is None:
        return None
    widths = [checked] * key_heads if isinstance(checked, int) else checked
    if len(widths) != key_heads:
        raise ValueError(f"halo must be an int, or one for each of the {key_heads} key heads, got {len(widths)}")
    return widths


def check_dropout(shard: Shard, dropout_p: float) -> None:
    """Dropout draws its mask for blocks of 4 keys, which no rank or segment may cut."""
    if dropout_p == 0:
        return
    if shard.length % 4:
        raise ValueError(f"query must hold a multiple of 4 tokens with dropout, got {shard.length}")
    if shard.segment_length is not None and shard.segment_length % 4:
        raise ValueError(f"segment_length must be a multiple of 4 with dropout, got {shard.segment_length}")


def check_parts(by: object) -> None:
    if not isinstance(by, str) or by not in ("tokens", "rows"):
        raise ValueError(f"by must be 'tokens' or 'rows', got {by!r}")
