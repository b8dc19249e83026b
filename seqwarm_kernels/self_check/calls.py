"""Small calls of every operator, each compared with the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..attention.functional import alibi_attention, alibi_attention_varlen
from ..attention.slopes import alibi_slopes
from ..ops.library import overload
from ..ops.moment_statistics.schema import Statistic
from ..resizing.buffers import BatchBuffers
from ..resizing.functional import resize_batch
from .exact import Comparison, Exact

RESULTS = ("out", "lse", "grad_query", "grad_key", "grad_value", "grad_slopes")
_SEED = 5  # of dropout


class Call(Protocol):
    def compare(self, backend: str, device: str, dtype: torch.dtype) -> Iterable[Comparison]:
        """Compare the results of a backend with those of the reference."""


# ---- attention


def differentiate(
    attend: Callable[[list[Tensor]], Sequence[Tensor]], leaves: list[Tensor], weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """out, lse, and the gradients of a weighted sum of both: a tensor for each name of `RESULTS`."""
    out, lse = attend(leaves)
    seen = lse.isfinite()
    objective = (out * weights[0].to(out.dtype)).sum() + (lse * weights[1].to(lse.dtype))[seen].sum()
    gradients = torch.autograd.grad(objective, leaves, allow_unused=True, materialize_grads=True)
    return out.detach(), lse.detach(), *gradients


def _compare_attention(
    attend: Callable[[list[Tensor], str], Sequence[Tensor]], tensors: list[Tensor], lse: Sequence[int], backend: str
) -> Iterator[Comparison]:
    """Args: attend: a function of query, key, value, slopes and a backend; lse: the shape of lse."""
    query = tensors[0]
    weights = torch.randn(query.shape, device=query.device), torch.randn(lse, device=query.device)

    def results(leaves: list[Tensor], backend: str = "reference") -> tuple[Tensor, ...]:
        return differentiate(lambda given: attend(given, backend), [leaf.requires_grad_() for leaf in leaves], weights)

    found = results(tensors, backend)
    # Gradients of slopes are float32, from an output that was rounded to the query's dtype.
    dtypes = [torch.float32 if name == "lse" else query.dtype for name in RESULTS]
    yield from Exact(results, tensors).compare(RESULTS, found, dtypes)


@dataclass(frozen=True)
class Attention:
    """A call of `alibi_attention`, forward and backward."""

    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, int] = (129, 129)
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    token_major: bool = False  #: (B, S, H, D) in memory
    masked: bool = False  #: with padding that holds NaN
    slopes: tuple[float, ...] | None = None  #: of each head; None: `alibi_slopes`

    def compare(self, backend: str, device: str, dtype: torch.dtype) -> Iterator[Comparison]:
        batch_size, (query_heads, key_heads), (queries, keys) = 2, self.heads, self.lengths
        shapes = (query_heads, queries), (key_heads, keys), (key_heads, keys)
        tensors = [torch.randn(batch_size, *shape, self.head_dim, device=device).to(dtype) for shape in shapes]
        if self.token_major:
            tensors = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
        options = dict(self.options)
        if self.masked:
            shown = torch.arange(keys, device=device) < torch.tensor([[keys], [keys * 3 // 4]], device=device)
            options["key_padding_mask"] = shown
            tensors[1:] = [tensor.masked_fill(~shown[:, None, :, None], float("nan")) for tensor in tensors[1:]]

        def attend(leaves: list[Tensor], backend: str) -> Sequence[Tensor]:
            torch.manual_seed(_SEED)
            return alibi_attention(*leaves, return_lse=True, backend=backend, **options)

        default = self.slopes is None
        slopes = alibi_slopes(query_heads, device=device) if default else torch.tensor(self.slopes, device=device)
        yield from _compare_attention(attend, [*tensors, slopes], tensors[0].shape[:-1], backend)


@dataclass(frozen=True)
class PackedAttention:
    """A call of `alibi_attention_varlen`, forward and backward."""

    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = (30, 0, 140)
    head_dim: int = 64

    def compare(self, backend: str, device: str, dtype: torch.dtype) -> Iterator[Comparison]:
        ends = torch.tensor([0, *self.lengths]).cumsum(0).to(device, torch.int32)
        total, heads = sum(self.lengths), (4, 2, 2)
        tensors = [torch.randn(total, number, self.head_dim, device=device).to(dtype) for number in heads]

        def attend(leaves: list[Tensor], backend: str) -> Sequence[Tensor]:
            torch.manual_seed(_SEED)
            query, key, value, slopes = leaves
            longest = max(self.lengths)
            return alibi_attention_varlen(
                query, key, value, ends, ends, longest, longest, slopes,
                return_lse=True, backend=backend, **self.options,
            )  # fmt: skip

        slopes = alibi_slopes(heads[0], device=device)
        yield from _compare_attention(attend, [*tensors, slopes], (heads[0], total), backend)


# ---- resize_batch


#: Methods of resizing by name, and resize_batch's arguments for each.
METHODS: dict[str, dict[str, Any]] = {
    "truncate": {"mode": "truncate"},
    "truncate, last token kept": {"mode": "truncate", "keep_last_token": True},
    "reshape": {"mode": "reshape"},
    "reshape, padded": {"mode": "reshape", "remainder": "pad"},
    "reshape, overlapping": {"mode": "reshape", "remainder": "overlap"},
    "flatten": {"mode": "flatten"},
}


@dataclass(frozen=True)
class Resizing:
    """A call of `resize_batch`. The results must be those of the reference, bit for bit."""

    options: dict[str, Any]
    packed: bool = False
    into_buffers: bool = False

    def compare(self, backend: str, device: str, dtype: torch.dtype) -> Iterator[Comparison]:
        new_length = 12
        batch = _packed_batch(dtype) if self.packed else _batch_of_rows(dtype)
        on_device = {name: tensor if name == "cu_seqlens" else tensor.to(device) for name, tensor in batch.items()}
        out = None
        if self.into_buffers:
            options = {name: self.options[name] for name in ("mode", "remainder") if name in self.options}
            out = BatchBuffers(on_device, new_length, **options)

        def results(backend: str, batch: dict[str, Tensor], out: BatchBuffers | None = None) -> list[Tensor]:
            resized = resize_batch(batch, new_length, out=out, return_info=True, backend=backend, **self.options)
            return [tensor.cpu() for tensor in tree_leaves(resized)]

        names = [*batch, "valid_lengths", "position_ids", "num_valid_tokens"]
        both = results(backend, on_device, out), results("reference", batch)
        for name, one, other in zip(names, *both, strict=True):
            yield Comparison(name, 0.0 if torch.equal(one, other) else float("inf"), 0.0, float("nan"))


def _batch_of_rows(dtype: torch.dtype) -> dict[str, Tensor]:
    rows, length = 7, 31
    return {
        "input_ids": torch.arange(rows * length).view(rows, length),
        "attention_mask": (torch.arange(length) > torch.arange(rows)[:, None]).long(),
        "labels": torch.arange(rows * length).view(rows, length),
        "flags": torch.rand(rows, length) > 0.5,
        "embeddings": torch.randn(rows, length, 24).to(dtype),
        **{f"tensor_{index}": torch.randn(rows, length) for index in range(30)},  # more than fit into one launch
    }


def _packed_batch(dtype: torch.dtype) -> dict[str, Tensor]:
    lengths = torch.tensor([30, 0, 1, 140, 12])
    tokens = int(lengths.sum())
    return {
        "input_ids": torch.arange(tokens)[None],
        "labels": torch.arange(tokens)[None],
        "seq_idx": torch.repeat_interleave(lengths).int()[None],
        "position_ids": torch.cat([torch.arange(length) for length in lengths.tolist()])[None],
        "embeddings": torch.randn(1, tokens, 24).to(dtype),
        "weights": torch.randn(len(lengths)),
        "attention_mask": (torch.rand(1, tokens) > 0.2).long(),
        "cu_seqlens": torch.cat([torch.zeros(1), lengths.cumsum(0)]).int(),
    }


# ---- moment_statistics

#: Numbers of elements of the tensors: none, few and many.
MOMENT_SIZES = (1, 0, 7, *range(100, 130), 40_000)


@dataclass(frozen=True)
class Moments:
    """A call of `moment_statistics` on lists of small and large tensors."""

    def compare(self, backend: str, device: str, dtype: torch.dtype) -> Iterator[Comparison]:
        sizes = MOMENT_SIZES
        momentum, gradients = ([torch.randn(size, device=device).to(dtype) for size in sizes] for _ in range(2))
        second_moment = [tensor.square() for tensor in momentum]

        def compute(tensors: list[Tensor], backend: str = "reference") -> Sequence[Tensor]:
            count = len(sizes)
            lists = tensors[:count], tensors[count : 2 * count], tensors[2 * count :]
            return overload("moment_statistics", backend)(*map(list, lists)).unbind()

        tensors = [*momentum, *second_moment, *gradients]
        names = [statistic.name.lower() for statistic in Statistic]
        found = compute(tensors, backend)
        yield from Exact(compute, tensors).compare(names, found, [torch.float32] * len(names))


#: For each operator, its calls.
CALLS: dict[str, dict[str, Call]] = {
    "alibi_attention": {
        "causal, grouped heads": Attention(),
        "full, a window, head_dim 20": Attention({"causal": False, "window": 37}, (70, 200), head_dim=20),
        "segments, padding, dropout": Attention({"segment_length": 90, "dropout_p": 0.2}, (200, 200), masked=True),
        "600 tokens, where keys are skipped": Attention(lengths=(600, 600), heads=(2, 2)),
        "one query, token-major": Attention(lengths=(1, 130), token_major=True),
    },
    "alibi_attention_varlen": {
        "causal": PackedAttention(),
        "full, a window": PackedAttention({"causal": False, "window": 37}),
    },
    "resize_batch": {name: Resizing(options) for name, options in METHODS.items()},
    "resize_batch_out": {name: Resizing(options, into_buffers=True) for name, options in METHODS.items()},
    "resize_packed": {
        name: Resizing(options, packed=True) for name, options in METHODS.items() if "keep_last_token" not in options
    },
    "moment_statistics": {"34 tensors": Moments()},
}
