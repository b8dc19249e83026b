"""Context parallelism of models after `apply_alibi`: the attention of each layer reaches the tokens of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..models.alibi_layer import AlibiHeads, Packing
from ..utils.checks import check_module
from .checks import check_halo, check_mesh, check_parts
from .context_attention import context_attention, context_attention_varlen


class ContextParallel(ParallelStyle):
    """Lets the attention of a converted model reach the tokens of all ranks of the mesh. For `parallelize_module`::

        apply_alibi(model, 131_072)
        parallelize_module(model, mesh["context"], ContextParallel())
        ...
        loss = model(**shard_sequence(batch, mesh["context"])).loss  # or, for short rows, `ContextBatches`

    It acts on every ALiBi layer of the module that it is applied to, and no weight changes. In training mode the layers
    take their inputs for shards of rows, as `shard_sequence` returns them. In evaluation mode, and for whole rows,
    `sharded_by` must say what the inputs are. Everything else in the model must treat each token on its own. After
    `apply_alibi` positions do not matter, and the position ids and masks that transformers makes of a shard serve.

    Gradients of all parameters are partial sums over the ranks: average them over all ranks, as
    DistributedDataParallel and `fully_shard` over the flattened mesh do, with the losses of `shard_sequence`.

    Args:
        halo: As for `context_attention`.

    Raises:
        TypeError: `halo` is not an int or a sequence of ints, or the mesh is not a DeviceMesh.
        ValueError: The mesh has several dimensions, or the module has no ALiBi layer. In a forward: a cache or a
            pattern of the mask does not work on shards.
    """

    def __init__(self, halo: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.halo = check_halo(halo)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        heads = _heads(module)
        if not heads:
            raise ValueError(
                f"ContextParallel must be applied to a module with ALiBi layers, got {type(module).__name__}: call "
                "apply_alibi before parallelize_module"
            )
        for layer in heads:
            layer.context = LayerContext(device_mesh, self.halo)
        return module


@dataclass(frozen=True)
class LayerContext:
    """The `context` of an `AlibiHeads`: attends rows whose tokens are sharded over the ranks of a mesh."""

    mesh: DeviceMesh
    halo: int | Sequence[int] | None
    by: str = "tokens"  #: what each rank has: a part of the tokens of all rows, or whole "rows"
    in_evaluation: bool = False  #: whether the caller said that this is so in evaluation mode, too

    def shards_tokens(self, *, training: bool) -> bool:
        """Whether the inputs of a layer are parts of rows, which need the keys of other ranks.

        Raises:
            ValueError: The layer is in evaluation mode, and its inputs were not described.
        """
        if not (training or self.in_evaluation):
            raise ValueError(
                "model must be in training mode under ContextParallel, or its inputs be described, got a call in "
                'evaluation mode: use `with sharded_by(model, "rows"):` if each rank has rows of its own, as in '
                '`generate`, or `with sharded_by(model, "tokens"):` for batches of shard_sequence'
            )
        return self.by == "tokens"

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor,
        *,
        packing: Packing | None,
        query_start: Tensor | None,
        key_padding_mask: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """Arguments and result are those of `alibi_layer_attention`. Boundaries are those of all ranks' tokens."""
        if query_start is not None or query.shape[2] != key.shape[2]:
            raise ValueError(
                f"the cache must be None under ContextParallel, got {query.shape[2]} queries and {key.shape[2]} "
                'keys: generate in `with sharded_by(model, "rows"):`, where each rank has whole rows'
            )
        options |= {"mesh": self.mesh, "halo": self.halo}
        if packing is None:
            if key_padding_mask is None:  # ranks must exchange the same tensors, and another one may have padding
                key_padding_mask = torch.ones(len(key), key.shape[2], dtype=torch.bool, device=key.device)
            return context_attention(query, key, value, slopes, key_padding_mask=key_padding_mask, **options)
        if len(query) != 1:
            raise ValueError(f"packed sequences must be in one row under ContextParallel, got {len(query)} rows")
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out = context_attention_varlen(q, k, v, packing.cu_seqlens_q, packing.max_seqlen_q, slopes, **options)
        return out.transpose(0, 1)[None]


@contextmanager
def sharded_by(model: nn.Module, by: str) -> Iterator[None]:
    """Say what the inputs of a model with `ContextParallel` are in this block. Forward and backward belong into it.

    Blocks may be nested: the innermost counts.

    Args:
        model: Holds the layers. It may be wrapped or compiled.
        by: "tokens": each rank has a part of the tokens of all rows. That is the default in training mode.
            "rows": each rank has whole rows, and nothing is exchanged.

    Raises:
        TypeError: `model` is not a module.
        ValueError: `by` is neither, or the model has no layer with `ContextParallel`.
    """
    check_module("model", model)
    check_parts(by)
    before = {layer: layer.context for layer in _layers(model)}
    expect(model, by, in_evaluation=True)
    try:
        yield
    finally:
        for layer, context in before.items():
            layer.context = context


def expect(model: nn.Module, by: str, *, in_evaluation: bool = False) -> None:
    """Let the layers of a model with `ContextParallel` take their inputs for shards by "tokens" or whole "rows".

    Raises:
        ValueError: The model has no layer with `ContextParallel`.
    """
    layers = _layers(model)
    if not layers:
        raise ValueError("model must have layers with ContextParallel, got none: call parallelize_module first")
    for layer in layers:
        layer.context = replace(layer.context, by=by, in_evaluation=in_evaluation)


def context_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which `ContextParallel` shards the rows of a model, or None without it."""
    return next((layer.context.mesh for layer in _layers(model)), None)


def _layers(model: nn.Module) -> list[Any]:
    return [layer for layer in _heads(model) if layer.context is not None]


def _heads(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, AlibiHeads)]
