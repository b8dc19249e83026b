"""Context parallelism of models after `apply_alibi`: the attention of each layer reaches the tokens of other ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..models.alibi_layer import AlibiHeads, Packing
from ..schedule.attachment import attachment_of
from ..utils.modules import CONTEXT_PART
from .checks import check_halo, check_mesh, check_parts
from .context_attention import context_attention, context_attention_varlen


class ContextParallel(ParallelStyle):
    """Lets the attention of a converted model reach the tokens of all ranks of the mesh. For `parallelize_module`::

        apply_alibi(model, 131_072)
        parallelize_module(model, mesh["context"], ContextParallel())
        ...
        loss = model(**shard_sequence(batch, mesh["context"])).loss  # or, for short rows, `ContextBatches`

    It acts on every ALiBi layer of the module that it is applied to, and no weight changes. Batches of `shard_sequence`
    say in the entry "context_part" whether they hold a part of the tokens of all rows or whole rows. A hook takes this
    entry from the arguments of the module's call, or reads it in a batch that is the first argument. Other inputs are
    whole rows in evaluation mode, and an error in training mode: describe them with `sharded_by`.

    Everything else in the model must treat each token on its own. After `apply_alibi` positions do not matter, and the
    position ids and masks that transformers makes of a shard fit. Call backward before the next forward: activation
    checkpointing runs the layers again, for the inputs of the last call.

    Gradients of all parameters are partial sums over the ranks: average them over all ranks, as
    DistributedDataParallel and `fully_shard` over the flattened mesh do, with the losses of `shard_sequence`.

    Args:
        halo: As for `context_attention`.

    Raises:
        TypeError: `halo` is not an int or a sequence of ints, or the mesh is not a DeviceMesh.
        ValueError: The mesh has several dimensions, or the module has no ALiBi layer, or a scheduler attached. In a
            forward: nothing says what the inputs are, or a cache or a pattern of the mask does not work on shards.
    """

    def __init__(self, halo: int | Sequence[int] | None = None) -> None:
        super().__init__()
        self.halo = check_halo(halo)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        check_mesh(device_mesh)
        heads = [each for each in module.modules() if isinstance(each, AlibiHeads)]
        if not heads:
            raise ValueError(
                f"ContextParallel must be applied to a module with ALiBi layers, got {type(module).__name__}: call "
                "apply_alibi before parallelize_module"
            )
        if any(attachment_of(each) is not None for each in module.modules()):
            raise ValueError("module must have no scheduler attached; call shard(scheduler.resize(batch))")
        context = SharedContext(device_mesh, self.halo)
        for layer in heads:
            layer.context = context
        # Before the hooks of apply_alibi, which ask what the inputs are.
        module.register_forward_pre_hook(context.take_part, prepend=True, with_kwargs=True)
        return module


class SharedContext:
    """What all layers under one `ContextParallel` share, the `context` of their `AlibiHeads`: how and what to attend.

    Attributes:
        part: What the last batch said that it holds: "tokens" of all rows, or whole "rows". None if it said nothing.
        described: The same, as `sharded_by` says it of batches that say nothing.
    """

    def __init__(self, mesh: DeviceMesh, halo: int | Sequence[int] | None) -> None:
        self.mesh, self.halo = mesh, halo
        self.part: str | None = None
        self.described: str | None = None

    def take_part(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The forward pre-hook of the module that `ContextParallel` was applied to."""
        batch = args[0] if args and isinstance(args[0], Mapping) else kwargs
        self.part = batch.get(CONTEXT_PART)
        return args, {name: value for name, value in kwargs.items() if name != CONTEXT_PART}

    def shards_tokens(self, *, training: bool) -> bool:
        """Whether the inputs of a layer are parts of rows, which need the keys of other ranks.

        Raises:
            ValueError: The layer is in training mode, and nothing says what its inputs are.
        """
        part = self.part or self.described
        if part is None and training:
            raise ValueError(
                "inputs under ContextParallel must be a batch of shard_sequence or ContextBatches in training mode, or "
                "be described by sharded_by"
            )
        return part == "tokens"

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
                "keys: generate from whole rows in evaluation mode"
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
    """Say what the inputs of a model with `ContextParallel` are in this block, where no batch of `shard_sequence` says.

    Such inputs are tensors in positional arguments, or those of a model of which only a submodule has
    `ContextParallel`. Forward and backward belong into the block. Blocks may be nested: the innermost counts.

    Args:
        model: Holds the layers. It may be wrapped or compiled.
        by: "tokens": each rank has a part of the tokens of all rows. "rows": each rank has whole rows, and nothing is
            exchanged.

    Raises:
        ValueError: `by` is neither, or the model has no layer with `ContextParallel`.
    """
    check_parts(by)
    before = {context: context.described for context in _contexts(model)}
    if not before:
        raise ValueError("model must have layers with ContextParallel, got none: call parallelize_module first")
    try:
        for context in before:
            context.part, context.described = None, by
        yield
    finally:
        for context, described in before.items():
            context.part, context.described = None, described


def context_mesh(model: nn.Module) -> DeviceMesh | None:
    """The mesh over which `ContextParallel` shards the rows of a model, or None without it."""
    return next((context.mesh for context in _contexts(model)), None)


def _contexts(model: nn.Module) -> list[SharedContext]:
    """One for each `ContextParallel` that was applied in the model."""
    heads = (module for module in model.modules() if isinstance(module, AlibiHeads))
    return list(dict.fromkeys(layer.context for layer in heads if layer.context is not None))
