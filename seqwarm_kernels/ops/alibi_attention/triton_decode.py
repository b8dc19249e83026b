"""Host side of decoding: when few queries are split over chunks of keys, and the launches of its two kernels."""

from __future__ import annotations

import math

import triton
from torch import Tensor

from ..triton_launch import Launch, on
from .schema import DenseOptions, VarlenOptions, allocate_outputs
from .triton_arguments import (
    UNBOUNDED,
    allocate,
    contiguous,
    has_head_offsets,
    mask_strides,
    precision_of,
    query_offset_of,
    shell_of,
    start_stride,
    strides_named,
)
from .triton_configurations import Tiles, block_d
from .triton_decode_kernel import decode_kernel, merge_kernel
from .triton_readers import Reader, strides_of
from .triton_tiles import ALIGNED

#: More queries fill the tiles of the other kernel.
MOST_QUERIES = 16
#: Keys of a program. Fixed, so that results do not depend on the GPU.
CHUNK = 256
MERGED_CHUNKS = 16  # at a time


def decodes(query: Tensor, key: Tensor, options: DenseOptions | VarlenOptions) -> bool:
    """Whether the keys of a call are split over programs. Never with segments, which have as many queries as keys."""
    if isinstance(options, VarlenOptions):
        return False
    return query.shape[2] <= MOST_QUERIES and key.shape[2] >= 2 * CHUNK


def decode_tiles(rows: int, head_dim: int, bytes_per_element: int) -> Tiles:
    """The largest tiles that fit into registers. `rows`: the queries of a key head."""
    row_bytes = bytes_per_element * block_d(head_dim)
    block_m = min(max(MOST_QUERIES, triton.next_power_of_2(rows)), 32)  # Triton 3.7 fails at 64 on Blackwell
    if bytes_per_element == 4:
        return Tiles(16, 32 if row_bytes < 256 else 16, 4, 2)
    return Tiles(block_m, 64 if row_bytes <= 256 else 32, 4, 3)


class Decode:
    """Forward of decoding calls with one key."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: DenseOptions) -> None:
        self._readers = Reader(query, ALIGNED.value), Reader(key, ALIGNED.value), Reader(value, ALIGNED.value)
        batch_size, num_heads, query_length, head_dim = query.shape
        num_key_heads, key_length = key.shape[1:3]
        group_size = num_heads // num_key_heads
        tiles = decode_tiles(group_size * query_length, head_dim, query.element_size())
        num_rows, num_chunks = batch_size * num_heads * query_length, triton.cdiv(key_length, CHUNK)
        num_parts = triton.cdiv(group_size, tiles.block_m // query_length)
        like_query, lse, _, _ = self._outputs = allocate_outputs(shell_of(query))
        sums = lse.new_empty((num_rows, num_chunks, 2))
        self._shells = [*self._outputs, lse.new_empty((num_rows, num_chunks, block_d(head_dim))), sums]
        tolerance = options.skip_tolerance * (0.5 if options.causal else 0.25)
        shared = {
            "window": UNBOUNDED if options.window is None else min(options.window, UNBOUNDED),
            "num_heads": num_heads,
            "query_length": query_length,
            "key_length": key_length,
            "stride_start": start_stride(options.query_start),
            "stride_slope_b": 0 if slopes.dim() == 1 else slopes.float().stride(0),
            "stride_slope_h": slopes.float().stride(-1),
            "CAUSAL": options.causal,
            "LIMITED": options.window is not None,
            "HEAD_DIM": head_dim,
            "BLOCK_D": block_d(head_dim),
        }
        of_query, of_key, of_value = (reader.strides for reader in self._readers)
        self._decode = Launch(
            decode_kernel,
            batch_size * num_key_heads * num_parts * num_chunks,
            **shared,
            scale=options.scale,
            log2_tolerance=math.log2(tolerance) if tolerance > 0 else -math.inf,
            log2_keys=math.log2(key_length),
            dropout_threshold=int(options.dropout_p * 2**32),
            group_size=group_size,
            **strides_named("q", of_query),
            **strides_named("k", of_key),
            **strides_named("v", of_value),
            **mask_strides(options.key_padding_mask),
            HEAD_OFFSETS=has_head_offsets(options.dropout_seed),
            BLOCK_M=tiles.block_m,
            BLOCK_N=tiles.block_n,
            CHUNK=CHUNK,
            PRECISION=precision_of(query.dtype),
            num_warps=tiles.num_warps,
            num_stages=tiles.num_stages,
        )
        self._merge = Launch(
            merge_kernel,
            num_rows,
            **shared,
            inverse_keep=1 / (1 - options.dropout_p),
            num_chunks=num_chunks,
            **strides_named("o", strides_of(like_query)),
            CHUNKS=MERGED_CHUNKS,
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: DenseOptions
    ) -> tuple[Tensor, ...]:
        out, lse, log2_sum, ranges, partial_out, partial_sums = allocate(self._shells, query.device)
        query, key, value = (reader(tensor) for reader, tensor in zip(self._readers, (query, key, value), strict=True))
        slopes, offset = slopes.float(), query_offset_of(options)
        with on(query.device):
            self._decode(
                query,
                key,
                value,
                slopes,
                options.query_start,
                options.key_padding_mask,
                contiguous(options.dropout_seed),
                contiguous(options.key_norm_bound),
                partial_out,
                partial_sums,
                ranges,
                offset,
            )
            self._merge(partial_out, partial_sums, slopes, options.query_start, out, lse, log2_sum, offset)
        return out, lse, log2_sum, ranges
