"""What makes an attention layer an ALiBi layer, and the attention of such a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention.functional import alibi_attention, alibi_attention_varlen


class AlibiHeads(nn.Module):
    """The slopes of one layer's heads: float32, whatever the model is cast to; saved in the model's state.

    Args:
        slopes: of each head.
        causal: whether queries see only keys before them; None where the caller says it in each call.
        learned: slopes are a parameter.
        device: where they live.
    """

    slopes: Tensor

    def __init__(
        self,
        slopes: Sequence[float],
        *,
        causal: bool | None,
        learned: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.initial = tuple(slopes)
        self.causal = causal
        tensor = torch.tensor(self.initial, dtype=torch.float32, device=device)
        if learned:
            self.slopes = nn.Parameter(tensor)
        else:
            self.register_buffer("slopes", tensor)

    def reset_parameters(self) -> None:
        """For models that are made without memory and filled later."""
        with torch.no_grad():
            self.slopes.copy_(torch.tensor(self.initial))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> AlibiHeads:
        """Slopes follow to other devices, not to other dtypes: at distance 1000, bfloat16 slopes are off by 2."""

        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def extra_repr(self) -> str:
        kind = "learned" if isinstance(self.slopes, nn.Parameter) else "fixed"
        return f"num_heads={len(self.initial)}, causal={self.causal}, {kind}"


class Packing(NamedTuple):
    """Sequences one after another, without padding; as `alibi_attention_varlen` takes them."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


class Call(NamedTuple):
    """One call of `attend`, as an observer sees it."""

    layer: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    exact: Callable[[Tensor], Tensor]  #: of slopes: what `out` should be, in float64 by the reference


_observers: list[Callable[[Call], None]] = []


@contextmanager
def observed(observer: Callable[[Call], None]) -> Iterator[None]:
    """`observer` sees every call of `attend` inside."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def attend(
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
    """`alibi_attention` with the slopes that `apply_alibi` gave to `layer`.

    Args:
        layer: has `alibi`, an `AlibiHeads`.
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D).
        value: (B, Hkv, Sk, D).
        causal: default: what the layer was given.
        packing: the rows of the batch, one after another, hold sequences of these lengths.

    Returns:
        (B, Hq, Sq, D).
    """
    heads: AlibiHeads = layer.alibi  # type: ignore[assignment]
    causal = heads.causal if causal is None else causal
    options: dict[str, Any] = {"causal": causal, "scale": scale, "window": window}
    if packing is None:
        options |= {"query_start": query_start, "key_padding_mask": key_padding_mask}
        out = alibi_attention(query, key, value, heads.slopes, dropout_p=dropout_p, **options)
    else:
        out = _attend_packed(query, key, value, packing, slopes=heads.slopes, dropout_p=dropout_p, **options)
    for observer in _observers:
        observer(Call(layer, query, key, value, out, _exact(query, key, value, packing, options)))
    return out


def _attend_packed(query: Tensor, key: Tensor, value: Tensor, packing: Packing, **options: Any) -> Tensor:
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = alibi_attention_varlen(q, k, v, *packing, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _exact(
    query: Tensor, key: Tensor, value: Tensor, packing: Packing | None, options: dict[str, Any]
) -> Callable[[Tensor], Tensor]:
    tensors = query.double(), key.double(), value.double()
    precise = {**options, "skip_tolerance": 0.0, "backend": "reference"}

    def attended(slopes: Tensor) -> Tensor:
        if packing is None:
            return alibi_attention(*tensors, slopes, **precise)
        return _attend_packed(*tensors, packing, slopes=slopes, **precise)

    return attended
