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
from ..utils.checks import (
    check_bool,
    check_dense,
    check_device,
    check_has_values,
    check_iterable,
    check_real,
    is_dtensor,
)
from ..utils.devices import to_float64

_ROUNDED = (
    "slopes are used in {}, because a mixed-precision policy of fully_shard casts learned slopes with their layer: at "
    "a distance of 1000 tokens the bias is off by up to 2. For slopes in float32 first call fully_shard(layer.alibi) "
    "for each layer with ALiBi, without a policy, and shard the layers and the model then"
)

#: The `slopes` of `apply_alibi`: (H,) for all layers, or a list with the (H,) of each layer.
Slopes = tuple[float, ...] | list[tuple[float, ...]]


def check_slopes(slopes: Any) -> Slopes:
    """Return the `slopes` of `apply_alibi` as numbers. Each must be finite in float32 and not negative."""
    rows = _elements(slopes)
    if any(isinstance(row, Iterable) for row in rows):
        return [_row(row) for row in rows]
    return _row(rows)


def _row(slopes: Any) -> tuple[float, ...]:
    row = tuple(float(check_real("slopes", slope)) for slope in _elements(slopes))
    for slope in row:
        if not 0 <= slope <= torch.finfo(torch.float32).max:
            raise ValueError(f"slopes must be finite in float32 and not negative, got {slope}")
    return row


def _elements(slopes: Any) -> list[Any]:
    """Return the elements of a sequence, array or tensor. Those of a tensor are numbers of Python."""
    check_iterable("slopes", slopes, "a sequence of numbers")
    if isinstance(slopes, Tensor):
        check_dense("slopes", slopes)
        check_has_values("slopes", slopes)
        return slopes.tolist()
    return list(slopes)


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
        TypeError: An argument has the wrong type.
        ValueError: `slopes` is empty, or a slope is not finite.
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
        numbers = _elements(slopes)
        if causal is not None:
            check_bool("causal", causal)
        check_bool("learned", learned)
        device = None if device is None else check_device("device", device)
        self.initial = tuple(check_real("slopes", slope) for slope in numbers)
        if not self.initial:
            raise ValueError("slopes must hold one number for each head, got none")
        if max(map(abs, self.initial)) > torch.finfo(torch.float32).max:
            raise ValueError(f"slopes must be finite in float32, got {max(self.initial, key=abs)}")
        self.causal = causal
        self.context: Any = None
        tensor = torch.tensor(self.initial, dtype=torch.float32, device=device)
        if learned:
            self.slopes = nn.Parameter(tensor)
        else:
            self.register_buffer("slopes", tensor)

    @property
    def learned(self) -> bool:
        return isinstance(self.slopes, nn.Parameter)

    def reset_parameters(self) -> None:
        """Set the slopes to their initial values, for models that were created on the meta device."""
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
            raise ValueError(
                f"slopes must be of a number of heads that the {mesh.size()} ranks of the mesh divide, got "
                f"{len(self.initial)} heads"
            )
        slopes = distribute_tensor(self.slopes.detach(), mesh, [Shard(0)], src_data_rank=src_data_rank)
        return nn.Parameter(slopes, requires_grad=self.slopes.requires_grad) if self.learned else slopes

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AlibiHeads:
        """Move slopes to other devices, but not to other dtypes: at distance 1000, bfloat16 slopes are off by 2."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

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
    slopes = _slopes_for(query, heads)
    causal = heads.causal if causal is None else causal
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    if has_shards(heads):
        visible = {"packing": packing, "query_start": query_start, "key_padding_mask": key_padding_mask}
        return heads.context(query, key, value, slopes, dropout_p=dropout_p, **visible, **options)
    if packing is None:
        options |= {"query_start": query_start, "key_padding_mask": key_padding_mask}
        out = alibi_attention(query, key, value, slopes, dropout_p=dropout_p, **options)
    else:
        out = _packed_attention(query, key, value, packing, slopes=slopes, dropout_p=dropout_p, **options)
    for observer in _observers:
        reference = _reference(query, key, value, packing, options)
        observer(AttentionCall(layer, query, key, value, slopes, out, reference))
    return out


def has_shards(heads: Any) -> bool:
    """Whether the rows of a layer's inputs are sharded, so that the `context` of its `AlibiHeads` must attend."""
    return heads.context is not None and bool(heads.context.shards_tokens(training=heads.training))


def _slopes_for(query: Tensor, heads: AlibiHeads) -> Tensor:
    """The slopes of the query's heads: those of this rank if the query is a plain tensor."""
    slopes: Any = heads()
    if slopes.itemsize < 4 and not torch.compiler.is_compiling():  # which cannot trace a warning
        warnings.warn(_ROUNDED.format(slopes.dtype), stacklevel=2)
    if is_dtensor(slopes) and not is_dtensor(query):
        slopes = slopes.to_local()
    if query.shape[1] != slopes.shape[0]:
        raise ValueError(
            f"query must have the {slopes.shape[0]} heads that the layer has slopes for, got {query.shape[1]} heads: "
            "under tensor parallelism, each rank needs the slopes of its heads. Call apply_alibi, then "
            "parallelize_module with seqwarm_kernels.parallel.ShardSlopes() for each `alibi` module of a layer with "
            "sharded heads"
        )
    return slopes


def _packed_attention(query: Tensor, key: Tensor, value: Tensor, packing: Packing, **options: Any) -> Tensor:
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = alibi_attention_varlen(q, k, v, *packing, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


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
        if packing is None:
            return alibi_attention(*tensors, moved(slopes), **precise)
        return _packed_attention(*tensors, Packing(*map(moved, packing)), slopes=moved(slopes), **precise)

    return attention
