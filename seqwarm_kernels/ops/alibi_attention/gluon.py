"""Host side of the Gluon kernels for Hopper: which calls take them, and their launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..triton_launch import INTERPRETED, Launch, on
from .gluon_backward_key import gluon_backward_key_kernel
from .gluon_backward_query import gluon_backward_query_kernel
from .gluon_forward import gluon_forward_kernel
from .gluon_tiles import ROWS
from .schema import DenseOptions, allocate_like, allocate_outputs
from .triton_arguments import (
    LONGEST_SEGMENT,
    UNBOUNDED,
    allocate,
    query_offset_of,
    row_strides,
    shell_of,
    start_stride,
    sum_slopes,
)
from .triton_configurations import KEY_STAGES, VALUE_STAGES, GluonTiles, block_d, chip_of, gluon_tiles
from .triton_ranges import KeyNorms, KeyRanges, hides_keys, log2_tolerance, programs_of, skips
from .triton_readers import Reader, sizes_of
from .triton_tiles import BULK

_BLOCK = 2 * ROWS.value  # rows of a program


def _tiles_of(query: Tensor, key: Tensor, options: Any) -> GluonTiles | None:
    if INTERPRETED or not isinstance(options, DenseOptions) or not query.numel() or not key.numel():
        return None
    plain = options.key_padding_mask is None and options.dropout_seed is None
    if not plain or query.element_size() != 2 or query.shape[-1] % 8:
        return None
    return gluon_tiles(chip_of(query.device), query.shape[-1])


def has_forward(query: Tensor, key: Tensor, options: Any) -> bool:
    tiles = _tiles_of(query, key, options)
    if tiles is None or hides_keys(options, query, key):  # bulk copies read keys that may hold NaN
        return False
    return query.shape[2] >= (tiles.skipping_from if skips(options, query, key) else tiles.forward_from)


def has_backward(query: Tensor, key: Tensor, options: Any) -> bool:
    """Also each query must see the key at its own position: then none holds NaN that no key may see."""
    tiles = _tiles_of(query, key, options)
    if tiles is None or query.shape[2] < tiles.backward_from or options.query_start is not None:
        return False
    sees = 0 <= options.query_offset <= key.shape[2] - query.shape[2]
    return sees and not hides_keys(options, query, key)


def _constant(query: Tensor, key: Tensor, slopes: Tensor, options: DenseOptions) -> dict[str, Any]:
    """The arguments that all kernels share, and that are the same in all calls with one key."""
    _, num_heads, query_length, head_dim = sizes_of(query)
    return {
        "window": UNBOUNDED if options.window is None else min(options.window, UNBOUNDED),
        "scale": options.scale,
        "segment_length": min(options.segment_length or LONGEST_SEGMENT, LONGEST_SEGMENT),
        "num_heads": num_heads,
        "group_size": num_heads // key.shape[1],
        "query_length": query_length,
        "key_length": key.shape[2],
        "stride_slope_b": 0 if slopes.dim() == 1 else slopes.stride(0),
        "stride_slope_h": slopes.stride(-1),
        "CAUSAL": options.causal,
        "LIMITED": options.window is not None or options.segment_length is not None,
        "BLOCK_D": block_d(head_dim),
    }


def _drawn(kernel: Any, works: int, device: torch.device, **arguments: Any) -> Launch:
    """Programs, one on each multiprocessor, that draw blocks of work."""
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return Launch(kernel, min(works, multiprocessors), num_works=works, **arguments, num_warps=4)


def _bulk(tensor: Tensor) -> Reader:
    return Reader(tensor, BULK.value)


def _tiles(reader: Reader, rows: int) -> Callable[[Tensor], Any]:
    dtype = gl.bfloat16 if reader.dtype == torch.bfloat16 else gl.float16
    layout = gl.NVMMASharedLayout.get_default_for([1, 1, rows, block_d(reader.sizes[3])], dtype)
    return reader.tiles(rows, TensorDescriptor, layout=layout, padding="zero")


def _vectors(rows: Tensor, block: int) -> TensorDescriptor:
    """Of (rows, tokens) float32."""
    layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), [1, block], layout)


class GluonForward:
    """Forward of calls with one key."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: DenseOptions) -> None:
        tiles = _tiles_of(query, key, options)
        assert tiles is not None
        readers = self._readers = _bulk(query), _bulk(key), _bulk(value)
        outputs = allocate_outputs(shell_of(query))
        rows = ROWS.value, tiles.forward_keys, tiles.forward_keys, ROWS.value
        of_all = zip((*readers, _bulk(outputs[0])), rows, strict=True)
        self._tiles = [_tiles(reader, count) for reader, count in of_all]
        self._key_norms = KeyNorms(readers[1], None) if skips(options, query, key) else None
        self._shells = [*outputs, torch.empty(1, dtype=torch.int32, device="meta")]
        if self._key_norms:
            self._shells.append(self._key_norms.shell)
        self._launch = _drawn(
            gluon_forward_kernel,
            programs_of(readers[0].sizes, _BLOCK),
            query.device,
            **_constant(query, key, slopes, options),
            log2_tolerance=log2_tolerance(options, query, key),
            stride_start=start_stride(options.query_start),
            BLOCK_N=tiles.forward_keys,
            STAGES=tiles.forward_stages,
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: DenseOptions
    ) -> tuple[Tensor, ...]:
        out, lse, log2_sum, ranges, counter, *key_norms = allocate(self._shells, query.device)
        query, key, value = (read(tensor) for read, tensor in zip(self._readers, (query, key, value), strict=True))
        slopes, offset = slopes.float(), query_offset_of(options)
        norms = key_norms[0] if key_norms else slopes  # any tensor in place of norms, of which nothing is read
        described = [tiles(tensor) for tiles, tensor in zip(self._tiles, (query, key, value, out), strict=True)]
        with on(query.device):
            if self._key_norms:
                self._key_norms(key, None, norms)
            *inputs, of_out = described
            self._launch(
                *inputs, slopes, options.query_start, norms, of_out, lse, log2_sum, ranges, counter.zero_(), offset
            )
        return out, lse, log2_sum, ranges


class GluonBackward:
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
        tiles = _tiles_of(query, key, options)
        assert tiles is not None
        self._readers = [_bulk(tensor) for tensor in (query, grad_out, out, key, value)]
        of_query, of_grad, _, of_key, of_value = self._readers
        results = [allocate_like(shell_of(tensor)) for tensor in (query, key, value)]
        rows = query.shape[0] * query.shape[1]
        padded = triton.cdiv(query.shape[2], _BLOCK) * _BLOCK
        terms = torch.empty(rows, padded, dtype=torch.float32, device="meta")
        last = torch.empty(lse.shape if slopes_need_grad else 0, dtype=lse.dtype, device="meta")
        self._key_ranges = KeyRanges(of_query, of_key, _BLOCK)
        counters = torch.empty(2, dtype=torch.int32, device="meta")
        self._shells = [*results, terms, terms, last, self._key_ranges.shell, counters]
        shared = _constant(query, key, slopes, options)
        columns = tiles.backward_keys
        rows_of_query = *[ROWS.value] * 3, columns, columns, ROWS.value
        of_all = zip((*self._readers, _bulk(results[0])), rows_of_query, strict=True)
        self._query_tiles = [_tiles(reader, count) for reader, count in of_all]
        self._query_launch = _drawn(
            gluon_backward_query_kernel,
            programs_of(of_query.sizes, _BLOCK),
            query.device,
            **shared,
            **row_strides(grad_lse),
            stride_start=0,
            stride_rows=padded,
            BLOCK_N=columns,
            K_STAGES=KEY_STAGES,
            V_STAGES=VALUE_STAGES,
        )
        self._columns = tiles.backward_queries
        rows_of_key = self._columns, self._columns, *[ROWS.value] * 4
        of_all = zip((of_query, of_grad, of_key, of_value, *map(_bulk, results[1:])), rows_of_key, strict=True)
        self._key_tiles = [_tiles(reader, count) for reader, count in of_all]
        self._key_launch = _drawn(
            gluon_backward_key_kernel,
            programs_of(of_key.sizes, _BLOCK),
            query.device,
            **shared,
            BLOCK_M=self._columns,
            STAGES=tiles.backward_stages,
        )

    def __call__(self, tensors: tuple[Any, ...], options: DenseOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_out, grad_lse, out, _, log2_sum, ranges, slopes_need_grad, query, key, value, slopes = tensors
        log2_sum, ranges, offset = log2_sum.contiguous(), ranges.contiguous(), query_offset_of(options)
        grad_query, grad_key, grad_value, lse2, delta, row_slopes, key_ranges, counters = allocate(
            self._shells, query.device
        )
        inputs = query, grad_out, out, key, value
        query, grad_out, out, key, value = (read(each) for read, each in zip(self._readers, inputs, strict=True))
        float_slopes = slopes.float()
        with on(query.device):
            self._key_ranges(ranges, key_ranges, counters)
            described = query, grad_out, out, key, value, grad_query
            *of_all, result = [tiles(each) for tiles, each in zip(self._query_tiles, described, strict=True)]
            self._query_launch(
                *of_all, float_slopes, None, ranges, grad_lse, log2_sum, lse2, delta, result,
                row_slopes if slopes_need_grad else None, counters[:1], offset,
            )  # fmt: skip
            described = query, grad_out, key, value, grad_key, grad_value
            of_query, of_grad, of_key, of_value, *results = [
                tiles(each) for tiles, each in zip(self._key_tiles, described, strict=True)
            ]
            terms = _vectors(lse2, self._columns), _vectors(delta, self._columns)
            self._key_launch(
                of_query, of_grad, *terms, of_key, of_value, float_slopes, key_ranges, *results, counters[1:], offset
            )
        grad_slopes = sum_slopes(row_slopes, slopes, options) if slopes_need_grad else row_slopes
        return grad_query, grad_key, grad_value, grad_slopes
