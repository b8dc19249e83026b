"""Exchanges between ranks that hold all heads of some tokens and ranks that hold some heads of all tokens.

Source: S. A. Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
Transformer Models", arXiv 2309.14509. P is the number of ranks of the mesh. Rank r holds the tokens r·S/P to
(r + 1)·S/P − 1, or the heads r·H/P to (r + 1)·H/P − 1.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from .checks import check_local, check_mesh


def tokens_to_heads(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """Exchange this rank's tokens of all heads for all tokens of this rank's heads. Differentiable.

    Attention between the two exchanges needs the slopes of this rank's heads:

        query, key, value = (tokens_to_heads(x, mesh) for x in (query, key, value))
        out = alibi_attention(query, key, value, local_heads(alibi_slopes(num_heads), mesh))
        out = heads_to_tokens(out, mesh)

    All ranks of the mesh must call it with tensors of the same shape. With dropout, each rank draws the mask of its
    heads from its own generator, so ranks need different seeds.

    Args:
        tensor: (B, H, S/P, D), a plain tensor: query, key or value. H must be a multiple of P, that of key and value
            too.
        mesh: The P ranks that share the tokens, one dimension.

    Returns:
        (B, H/P, S, D).

    Raises:
        TypeError: `tensor` is a DTensor, or `mesh` is no DeviceMesh.
        ValueError: P does not divide the heads. Repeat those of key and value by `repeat_interleave(n, dim=1)`, or keep
            tokens sharded and call `context_attention`.
    """
    ranks = _check(tensor, mesh)
    if tensor.shape[1] % ranks:
        raise ValueError(f"tensor must have a multiple of the {ranks} ranks as heads, got {tensor.shape[1]}")
    parts = tensor.unflatten(1, (ranks, -1)).transpose(0, 1)  # (P, B, H/P, S/P, D), by the rank that gets them
    return _exchange(parts, mesh).permute(1, 2, 0, 3, 4).flatten(2, 3)


def heads_to_tokens(tensor: Tensor, mesh: DeviceMesh) -> Tensor:
    """The reverse of `tokens_to_heads`: this rank's tokens of all heads. Differentiable.

    Args:
        tensor: (B, H/P, S, D), a plain tensor. S must be a multiple of P.
        mesh: The P ranks that share the heads, one dimension.

    Returns:
        (B, H, S/P, D).

    Raises:
        TypeError: `tensor` is a DTensor, or `mesh` is no DeviceMesh.
        RuntimeError: P does not divide the tokens.
    """
    ranks = _check(tensor, mesh)
    parts = tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)  # (P, B, H/P, S/P, D)
    return _exchange(parts, mesh).transpose(0, 1).flatten(1, 2)


def local_heads(slopes: Tensor, mesh: DeviceMesh) -> Tensor:
    """The slopes of this rank's heads, a view. The gradient of the other heads is zero on this rank.

    Args:
        slopes: (H,) or (B, H), those of all heads. H must be a multiple of P.
        mesh: The P ranks that share the heads, one dimension.

    Returns:
        (H/P,) or (B, H/P).

    Raises:
        TypeError: `mesh` is no DeviceMesh.
        RuntimeError: P does not divide the heads.
    """
    check_mesh(mesh)
    return slopes.unflatten(-1, (mesh.size(), -1)).select(-2, mesh.get_local_rank())


def _exchange(parts: Tensor, mesh: DeviceMesh) -> Tensor:
    """Part p goes to rank p. The result holds the part from each rank."""
    return all_to_all_single_autograd(parts.contiguous(), None, None, mesh.get_group())


def _check(tensor: Tensor, mesh: DeviceMesh) -> int:
    """Return the number of ranks."""
    check_local("tensor", tensor)
    check_mesh(mesh)
    return mesh.size()
