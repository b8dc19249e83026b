"""Which keys are skipped: whether a call looks for them, and the launches of the kernels that find them."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from ..triton_launch import Launch
from .schema import DenseOptions, VarlenOptions
from .triton_arguments import mask_strides, strides_named
from .triton_backward_ranges import RANGE_CHUNK, RANGE_TILES, backward_ranges_kernel
from .triton_configurations import block_d
from .triton_reach import NORM_BLOCK, NORM_ROWS, key_norms_kernel
from .triton_readers import Four, Reader, sizes_of
from .triton_tiles import ALIGNED

#: With fewer visible keys, finding keys to skip costs more than it saves.
MIN_KEYS_TO_SKIP = 512
#: With fewer queries for each key head too: the largest norms are found by reading all keys once.
MIN_QUERIES_TO_SKIP = 256

_Options = DenseOptions | VarlenOptions


def as_dense(options: _Options) -> DenseOptions:
    """The options that dense and packed calls share."""
    if isinstance(options, DenseOptions):
        return options
    _, _, seed, _, _, causal, scale, window, dropout_p, skip_tolerance, query_start = options
    return DenseOptions(query_start, None, seed, 0, causal, scale, None, window, dropout_p, skip_tolerance)


def hides_keys(options: _Options, query: Tensor, key: Tensor) -> bool:
    """Whether there may be keys that no query sees because of their positions. Such keys may hold NaN."""
    if isinstance(options, VarlenOptions):
        if options.query_start is not None:
            return True
        # In self-attention each key is seen by the query of its token.
        return options.window is not None and options.cu_seqlens_q.data_ptr() != options.cu_seqlens_k.data_ptr()
    if options.segment_length is not None or (not options.causal and options.window is None):
        return False
    if options.query_start is not None:
        return True
    window, offset = options.window, options.query_offset
    end = offset + query.shape[2] + (0 if options.causal or window is None else window)
    return end < key.shape[2] or (window is not None and offset > window)


def skips(options: _Options, query: Tensor, key: Tensor) -> bool:
    """Whether the kernels look for keys to skip."""
    _, num_heads, query_length, _ = sizes_of(query)
    _, num_key_heads, key_length, _ = sizes_of(key)
    dense = as_dense(options)
    visible = [key_length]
    if isinstance(options, VarlenOptions):
        visible.append(options.max_seqlen_k)
    if dense.segment_length is not None:
        visible.append(dense.segment_length)
    if dense.window is not None:
        visible.append(dense.window if dense.causal else 2 * dense.window)
    queries = query_length * (num_heads // num_key_heads)
    return dense.skip_tolerance > 0 and min(visible) >= MIN_KEYS_TO_SKIP and queries >= MIN_QUERIES_TO_SKIP


def log2_tolerance(options: _Options, query: Tensor, key: Tensor) -> float:
    """The share of the sum that may be left out on each side; −∞: no key is skipped."""
    sides = 1 if options.causal else 2
    return math.log2(options.skip_tolerance / sides) if skips(options, query, key) else -math.inf


def programs_of(sizes: Four, rows: int) -> int:
    batch_size, num_heads, length, _ = sizes
    return batch_size * num_heads * triton.cdiv(length, rows)


class KeyNorms:
    """(batch · heads · blocks) float32: the largest squared norm of the unmasked keys of each block of NORM_BLOCK."""

    def __init__(self, key: Reader, mask: Tensor | None) -> None:
        _, num_heads, length, head_dim = key.sizes
        programs = programs_of(key.sizes, NORM_BLOCK)
        self.shell = torch.empty(programs, dtype=torch.float32, device="meta")
        self._launch = Launch(
            key_norms_kernel,
            programs,
            num_heads=num_heads,
            key_length=length,
            **strides_named("k", key.strides),
            **mask_strides(mask),
            HEAD_DIM=head_dim,
            BLOCK_D=block_d(head_dim),
            ACCESS=ALIGNED.value,
            NORM_BLOCK=NORM_BLOCK,
            ROWS=NORM_ROWS,
        )

    def __call__(self, key: Tensor, mask: Tensor | None, norms: Tensor) -> None:
        self._launch(key, mask, norms)


class KeyRanges:
    """(batch · heads, tiles of `rows` keys, 2) int32: the range of queries that attended each tile of keys."""

    def __init__(self, query: Reader, key: Reader, rows: int) -> None:
        batch_size, num_heads, query_length, _ = query.sizes
        key_length = key.sizes[2]
        num_tiles = triton.cdiv(key_length, rows)
        self.shell = torch.empty(batch_size * num_heads, num_tiles, 2, dtype=torch.int32, device="meta")
        self._launch = Launch(
            backward_ranges_kernel,
            batch_size * num_heads * triton.cdiv(num_tiles, RANGE_TILES),
            query_length=query_length,
            key_length=key_length,
            BLOCK_N=rows,
            TILES=RANGE_TILES,
            CHUNK=RANGE_CHUNK,
        )

    def __call__(self, ranges: Tensor, key_ranges: Tensor, counters: Tensor | None = None) -> None:
        """Also sets two `counters` to 0."""
        self._launch(ranges, key_ranges, counters)
