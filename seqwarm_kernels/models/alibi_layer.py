"""ALiBi layers: the slopes of an attention layer, and the attention that uses them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.context_parallel import refuse_context_parallel_style
from ..attention.functional import alibi_attention, alibi_attention_varlen
from ..utils.checks import is_dtensor
from ..utils.devices import to_float64

#: The `slopes` of `apply_alibi`: (H,) for all layers, or a list with the (H,) of each layer.
Slopes = tuple[float, ...] | list[tuple[float, ...]]


def check_slopes(slopes: Any) -> Slopes:
    """Return the `slopes` of `apply_alibi` as numbers. Each must be finite in float32 and not negative."""
    rows = _listed(slopes)
    are_layers = any(isinstance(row, Iterable) for row in rows)
    return [_row(row) for row in rows] if are_layers else _row(rows)


def _row(slopes: Any) -> tuple[float, ...]:
    row = tuple(map(float, _listed(slopes)))
    for slope in row:
        if not 0 <= slope <= torch.finfo(torch.float32).max:
            raise ValueError(f"slopes must be finite in float32 and not negative, got {slope}")
    return row


def _listed(slopes: Any) -> list[Any]:
    return list(slopes.tolist() if isinstance(slopes, Tensor) else slopes)


class AlibiHeads(nn.Module):
    """The slopes of the heads of one layer. They stay float32 if the model is cast, and are saved in its state dict.

    Args:
        slopes: One for each head, finite.
        causal: Whether a query sees only the keys before it. None: each call decides.
        learned: Make the slopes a parameter. By default they are a buffer.
        device: Device of the slopes.

    Attributes:
        context: What attends instead of `alibi_attention` to rows that are sharded over ranks, as
            `parallel.ContextParallel` sets it, or None.

    Raises:
        ValueError: `slopes` is empty, or a slope is not finite in float32.
    """

    slopes: Tensor

    def __init__(
        self,
        slopes: Sequence[float] | Tensor,
        *,
        causal: bool | None,
        learned: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.initial = tuple(map(float, slopes))
        self.causal = causal
        self.context: Any = None
        tensor = torch.tensor(self.initial, dtype=torch.float32, device="cpu")
        if not self.initial or not tensor.isfinite().all():
            raise ValueError(f"slopes must be finite numbers, one for each head, got {self.initial}")
        tensor = tensor.to(device)
        if learned:
            self.slopes = nn.Parameter(tensor)
        else:
            self.register_buffer("slopes", tensor)

    @property
    def learned(self) -> bool:
        return isinstance(self.slopes, nn.Parameter)

    def reset_parameters(self) -> None:
        """Set the slopes to their initial values."""
        fill_slopes(self.slopes, torch.tensor(self.initial, dtype=torch.float32))

    def sharded_slopes(self, mesh: Any, src_data_rank: int | None) -> Tensor:
        """The slopes as a parameter or buffer of which each rank of `mesh` holds its heads: a DTensor, Shard(0).

        Args:
            mesh: A DeviceMesh of one dimension.
            src_data_rank: The rank whose slopes all ranks take, or None: each rank takes its own.

        Raises:
            ValueError: The mesh does not divide the number of heads.
        """
        from torch.distributed.tensor import Shard, distribute_tensor  # loads for half a second

        if len(self.initial) % mesh.size():
            raise ValueError(f"the mesh must divide the {len(self.initial)} heads of a layer, got {mesh.size()} ranks")
        slopes = distribute_tensor(self.slopes.detach(), mesh, [Shard(0)], src_data_rank=src_data_rank)
        return nn.Parameter(slopes, requires_grad=self.slopes.requires_grad) if self.learned else slopes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AlibiHeads:
        """Move the slopes to other devices, and neither cast nor empty them. `to` and `to_empty` have no public hook.

        At distance 1000, bfloat16 slopes are off by 2. `to_empty` would leave what was in memory, and no `init_weights`
        sets slopes. Slopes that come from the meta device are the initial ones.
        """
        had_values = not self.slopes.is_meta
        super()._apply(lambda tensor: tensor.to(fn(tensor).device) if had_values else fn(tensor).float(), recurse)
        if not had_values and not self.slopes.is_meta:
            self.reset_parameters()
        return self

    def forward(self) -> Tensor:
        """The slopes. Attention calls it as a module, so that `fully_shard` of this module alone gathers them."""
        # fully_shard frees what it gathered as soon as this returns.
        return self.slopes.clone() if hasattr(self, "unshard") else self.slopes

    def extra_repr(self) -> str:
        kind = "learned" if self.learned else "fixed"
        return f"num_heads={len(self.initial)}, causal={self.causal}, {kind}"


def fill_slopes(slopes: Tensor, values: Tensor) -> None:
    """Copy the values of all heads, a plain tensor, into slopes. They may be a DTensor."""
    if is_dtensor(slopes):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = slopes
        values = values.to(slopes.device)
        values = distribute_tensor(values, sharded.device_mesh, sharded.placements, src_data_rank=None)
    slopes.detach().copy_(values)


class Packing(NamedTuple):
    """Boundaries of packed sequences, as arguments of `alibi_attention_varlen`."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class AttentionCall(NamedTuple):
    """One call of `alibi_layer_attention`, recorded by `observe_calls`."""

    layer: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    slopes: Tensor
    out: Tensor
    reference: Callable[[Tensor], Tensor]  #: takes slopes; the output of the reference in float64, by `to_float64`


_observers: list[Callable[[AttentionCall], None]] = []


@contextmanager
def observe_calls(observer: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Pass every call of `alibi_layer_attention` in the block to `observer`."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def alibi_layer_attention(
    layer: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: bool | None = None,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    key_padding_mask: Tensor | None = None,
    query_start: Tensor | None = None,
    packing: Packing | None = None,
) -> Tensor:
    """Call `alibi_attention` with the slopes that `apply_alibi` gave to `layer`.

    Args:
        layer: Module with an attribute `alibi`, an `AlibiHeads`.
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, D).
        causal: Default: `layer.alibi.causal`.
        scale: See `alibi_attention`, as for `window`, `dropout_p`, `key_padding_mask` and `query_start`.
        packing: Boundaries of the packed sequences in the concatenated rows of the batch.

    Returns:
        (B, Hq, Sq, D).

    Raises:
        ValueError: The query has another number of heads than the slopes, as under tensor parallelism without
            `parallel.ShardSlopes`. The layer has the hooks of torch's context parallelism.
    """
    refuse_context_parallel_style(layer)
    heads: AlibiHeads = layer.alibi  # type: ignore[assignment]
    slopes = heads()
    local = slopes.to_local() if is_dtensor(slopes) and not is_dtensor(query) else slopes
    _check_heads(query, local)
    # The ranks that share the heads draw the dropout masks of one process if they attend as DTensors.
    over_ranks = slopes if dropout_p > 0 and len(slopes) != len(local) else None
    causal = heads.causal if causal is None else causal
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    if has_shards(heads):
        if over_ranks is not None:
            raise ValueError(f"dropout must be 0 if ranks share the heads and the tokens of a layer, got {dropout_p}")
        visible = {"packing": packing, "query_start": query_start, "key_padding_mask": key_padding_mask}
        return heads.context(query, key, value, local, dropout_p=dropout_p, **visible, **options)
    if packing is None:
        options |= {"query_start": query_start, "key_padding_mask": key_padding_mask}
    out = attend(query, key, value, packing, over_ranks=over_ranks, slopes=local, dropout_p=dropout_p, **options)
    for observer in _observers:
        reference = _reference(query, key, value, packing, options)
        observer(AttentionCall(layer, query, key, value, local, out, reference))
    return out


def has_shards(heads: Any) -> bool:
    """Whether the rows of a layer's inputs are sharded, so that the `context` of its `AlibiHeads` must attend."""
    return heads.context is not None and bool(heads.context.shards_tokens(training=heads.training))


def _check_heads(query: Tensor, slopes: Tensor) -> None:
    if slopes.itemsize < 4 and not torch.compiler.is_compiling():  # which cannot trace a warning
        warnings.warn(f"slopes are rounded to {slopes.dtype}: call fully_shard on each AlibiHeads first", stacklevel=3)
    if query.shape[1] != slopes.shape[0]:
        raise ValueError(
            f"query must have the layer's {slopes.shape[0]} heads, got {query.shape[1]}; for tensor parallelism, apply "
            "seqwarm_kernels.parallel.ShardSlopes to AlibiHeads"
        )


def attend(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing | None, *, over_ranks: Any | None = None, **options: Any
) -> Tensor:
    """Attend to (B, H, S, D). `over_ranks`: the slopes of all ranks, if these draw dropout masks together."""
    tensors: Any = query, key, value
    if packing is not None:
        tensors = [tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors]
    if over_ranks is not None:
        from torch.distributed.tensor import DTensor, Shard

        tensors = [
            DTensor.from_local(tensor, over_ranks.device_mesh, [Shard(1)], run_check=False) for tensor in tensors
        ]
        options["slopes"] = over_ranks
    q, k, v = tensors
    if packing is None:
        out = alibi_attention(q, k, v, **options)
    else:
        out = alibi_attention_varlen(q, k, v, *packing, **options)
        out = out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)
    return out if over_ranks is None else out.to_local()


def _reference(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing | None, options: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    tensors = to_float64(query), to_float64(key), to_float64(value)
    device = tensors[0].device

    def moved(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    precise = {name: moved(value) for name, value in options.items()}
    precise |= {"skip_tolerance": 0.0, "backend": "reference"}

    def attention(slopes: Tensor) -> Tensor:
        boundaries = None if packing is None else Packing(*map(moved, packing))
        return attend(*tensors, boundaries, slopes=moved(slopes), **precise)

    return attention
