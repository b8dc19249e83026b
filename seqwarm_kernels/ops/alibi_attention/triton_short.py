"""Host side of short rows: which calls have them, and the launches of their two kernels."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from ..triton_launch import Launch, on
from .schema import DenseOptions, VarlenOptions, allocate_like, allocate_outputs
from .triton_arguments import (
    UNBOUNDED,
    allocate,
    contiguous,
    has_head_offsets,
    precision_of,
    row_strides,
    shell_of,
    start_stride,
    strides_named,
    sum_slopes,
)
from .triton_configurations import ShortTile, block_d, chip_of, longer_tile, short_tile
from .triton_readers import Reader, is_aligned, strides_of
from .triton_short_kernel import short_backward_kernel, short_forward_kernel
from .triton_tiles import ALIGNED

_MOST_TOKENS = 2**29  # that the kernels count


def is_short(
    query: Tensor, key: Tensor, slopes: Tensor, options: DenseOptions | VarlenOptions, *, longer: bool = False
) -> bool:
    """Whether several whole rows, or segments, share the tiles of queries and keys. `longer` asks for the larger tiles
    that backward has for rows of 65 tokens and more."""
    if isinstance(options, VarlenOptions) or slopes.dim() != 1:
        return False
    batch_size, _, length, _ = query.shape
    if not 0 < length == key.shape[2] or batch_size * length > _MOST_TOKENS:
        return False
    unit = _unit(length, options)
    divides = length % unit == 0 and (options.dropout_seed is None or unit % 4 == 0)
    tile = _longer_tile_of(query, key) if longer else _tile_of(query)
    return divides and tile is not None and unit <= tile.tokens and batch_size * length > unit


def _tile_of(query: Tensor) -> ShortTile:
    return short_tile(chip_of(query.device), query.shape[3], query.element_size())


def _longer_tile_of(query: Tensor, key: Tensor) -> ShortTile | None:
    if query.shape[1] > key.shape[1]:  # sums over heads that share a key head would spill
        return None
    return longer_tile(chip_of(query.device), query.shape[3], query.element_size())


def _unit(length: int, options: DenseOptions) -> int:
    """Tokens of a row or segment."""
    return min(options.segment_length or length, length)


def _tokens_of_tile(tile: ShortTile, query: Tensor, options: DenseOptions) -> int:
    """Those of the whole rows, or segments, that a tile holds."""
    unit = _unit(query.shape[2], options)
    return tile.tokens // unit * unit


def _constant(
    tile: ShortTile, query: Tensor, readers: tuple[Reader, ...], slopes: Tensor, options: DenseOptions
) -> dict[str, Any]:
    """The arguments that both kernels share, and that are the same in all calls with one key."""
    of_query, of_key, of_value = readers
    batch_size, num_heads, length, head_dim = query.shape
    return {
        "window": UNBOUNDED if options.window is None else min(options.window, UNBOUNDED),
        "scale": options.scale,
        "inverse_keep": 1 / (1 - options.dropout_p),
        "dropout_threshold": int(options.dropout_p * 2**32),
        "segment_length": _unit(length, options),
        "tile_tokens": _tokens_of_tile(tile, query, options),
        "num_heads": num_heads,
        "group_size": num_heads // of_key.sizes[1],
        "num_tokens": batch_size * length,
        "row_length": length,
        "stride_start": start_stride(options.query_start),
        "stride_slope_h": slopes.float().stride(0),
        **strides_named("q", of_query.strides),
        **strides_named("k", of_key.strides),
        **strides_named("v", of_value.strides),
        "CAUSAL": options.causal,
        "HEAD_OFFSETS": has_head_offsets(options.dropout_seed),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "BLOCK": tile.tokens,
        "PRECISION": precision_of(query.dtype),
        "num_warps": tile.num_warps,
        "num_stages": 1,
    }


def _at_most(registers: int | None) -> dict[str, int]:
    """An option of the compiler that AMD's does not know."""
    return {} if registers is None else {"maxnreg": registers}


def _programs(tile: ShortTile, query: Tensor, heads: int, options: DenseOptions) -> int:
    batch_size, _, length, _ = query.shape
    return heads * triton.cdiv(batch_size * length, _tokens_of_tile(tile, query, options))


def _options_read(slopes: Tensor, options: DenseOptions) -> tuple[Tensor | None, ...]:
    start, mask, seed, *_ = options
    return slopes.float(), start, contiguous(mask), contiguous(seed)


class ShortForward:
    """Forward of calls with one key."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: DenseOptions) -> None:
        self._readers = tuple(Reader(tensor, ALIGNED.value) for tensor in (query, key, value))
        self._shells = allocate_outputs(shell_of(query))
        tile = _tile_of(query)
        self._launch = Launch(
            short_forward_kernel,
            _programs(tile, query, query.shape[1], options),
            **_constant(tile, query, self._readers, slopes, options),
            **strides_named("o", strides_of(self._shells[0])),
            **_at_most(tile.forward_registers),
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: DenseOptions
    ) -> tuple[Tensor, ...]:
        outputs = allocate(self._shells, query.device)
        inputs = (reader(tensor) for reader, tensor in zip(self._readers, (query, key, value), strict=True))
        with on(query.device):
            self._launch(*inputs, *_options_read(slopes, options), *outputs, options.query_offset)
        return tuple(outputs)


class ShortBackward:
    """Backward of calls with one key."""

    def __init__(
        self,
        grad_out: Tensor,
        grad_lse: Tensor | None,
        out: Tensor,
        lse: Tensor,
        slopes_need_grad: bool,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        slopes: Tensor,
        options: DenseOptions,
    ) -> None:
        self._readers = tuple(Reader(tensor, ALIGNED.value) for tensor in (grad_out, query, key, value))
        results = [allocate_like(shell_of(tensor)) for tensor in (query, key, value)]
        rows = torch.empty(lse.shape, dtype=lse.dtype, device="meta")
        last = rows if slopes_need_grad else slopes.new_empty(0, device="meta")
        self._shells = [*results, last]
        of_query, of_key, of_value = map(strides_of, results)
        self._copies_out = strides_of(out) != of_query or not is_aligned(out)
        grouped = query.shape[1] > key.shape[1]
        tile = _tile_of(query) if is_short(query, key, slopes, options) else _longer_tile_of(query, key)
        assert tile is not None
        self._launch = Launch(
            short_backward_kernel,
            _programs(tile, query, key.shape[1], options),
            **strides_named("g", self._readers[0].strides),
            **row_strides(grad_lse),
            **_constant(tile, query, self._readers[1:], slopes, options),
            **strides_named("o", of_query),
            **strides_named("x", of_key),
            **strides_named("y", of_value),
            GROUPED=grouped,
            **_at_most(None if grouped else tile.backward_registers),
        )

    def __call__(self, tensors: tuple[Any, ...], options: DenseOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_out, grad_lse, out, _, log2_sum, _, slopes_need_grad, *inputs, slopes = tensors
        *results, grad_slopes = allocate(self._shells, out.device)
        if self._copies_out:
            out = allocate_like(inputs[0]).copy_(out)
        grad_out, *inputs = (r(tensor) for r, tensor in zip(self._readers, (grad_out, *inputs), strict=True))
        with on(out.device):
            self._launch(
                grad_out,
                grad_lse,
                out,
                log2_sum.contiguous(),
                *inputs,
                *_options_read(slopes, options),
                *results,
                grad_slopes if slopes_need_grad else None,
                options.query_offset,
            )
        if slopes_need_grad:
            grad_slopes = sum_slopes(grad_slopes, slopes, options)
        return (*results, grad_slopes)
