"""The reach of a query: the distance beyond which all keys together weigh less than the tolerance.

docs/kernels/skipping.md has the proof. In base 2, with slope m > 0, a score at distance d is at most a − m·d, where
a = ‖q‖ · max‖k‖ · |scale| · log2(e). All keys at distance d₀ or more add at most 2^(a − m·d₀) / (1 − 2^(−m)) to a
softmax sum of at least 2^L. Their share of the sum is 2^t at

    d₀ = (a − L − log2(1 − 2^(−m)) − t) / m
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..triton_launch import kernel
from .triton_tiles import FAR, TileSource, kept_keys, load_tile

#: Number of keys that share an entry of the norms.
NORM_BLOCK = 256
NORM_ROWS = 64  # keys loaded at a time

# Margins for rounding: relative for a norm or a product, absolute for a sum in base 2.
_RELATIVE_MARGIN = tl.constexpr(1 + 2**-9)
_ABSOLUTE_MARGIN = tl.constexpr(2**-4)
# Flatter slopes reach beyond any length, and rounding would destroy 1 − 2^(−m).
_FLATTEST = tl.constexpr(2**-16)


@kernel
def key_norms_kernel(
    key,
    key_padding_mask,
    norms,  # (batch, heads, blocks) float32: the largest squared norm of each block's keys
    num_heads: tl.int32,
    key_length: tl.int32,
    stride_kb: tl.int64,
    stride_kh: tl.int64,
    stride_ks: tl.int64,
    stride_mb: tl.int64,
    stride_ms: tl.int64,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACCESS: tl.constexpr,
    NORM_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    num_blocks = tl.cdiv(key_length, NORM_BLOCK)
    program = tl.program_id(0)
    block = program % num_blocks
    head = program // num_blocks % num_heads
    batch = program // num_blocks // num_heads
    largest = 0.0
    source = TileSource(key, batch, head, key_length, None, stride_kb, stride_kh, stride_ks)
    if key_padding_mask is not None:
        key_padding_mask += batch.to(tl.int64) * stride_mb
    for step in tl.static_range(NORM_BLOCK // ROWS):
        start = block * NORM_BLOCK + step * ROWS
        kept = kept_keys(key_padding_mask, start, key_length, stride_ms, ROWS)
        tile = load_tile(source, start, kept, ROWS, HEAD_DIM, BLOCK_D, ACCESS).to(tl.float32)
        squares = tl.sum(tile * tile, 1)
        squares = tl.where(squares == squares, squares, float("inf"))  # keys with NaN must not be skipped
        largest = tl.maximum(largest, tl.max(squares, 0))
    tl.store(norms + program, largest)


@triton.jit
def largest_norm(norms, row, begin, end, length, NORM_BLOCK: tl.constexpr):
    """The largest norm of the keys in the blocks that overlap [begin, end). `row` counts through batch and heads."""
    CHUNK: tl.constexpr = 64
    num_blocks = tl.cdiv(length, NORM_BLOCK)
    base = norms + row.to(tl.int64) * num_blocks
    largest = 0.0
    end_block = tl.where(begin < end, tl.cdiv(end, NORM_BLOCK), 0)
    for first in range(begin // NORM_BLOCK, end_block, CHUNK):
        blocks = first + tl.arange(0, CHUNK)
        squares = tl.load(base + blocks, mask=blocks < end_block, other=0.0)
        largest = tl.maximum(largest, tl.max(squares, 0))
    return tl.sqrt(largest)


@triton.jit
def reach(query_norm, key_norm, scale2, slope2, sum2, log2_tolerance):
    """d₀ of each row as an int32, FAR where no finite bound holds. `sum2` is L, log2 of the sum so far."""
    most = query_norm * key_norm * tl.abs(scale2) * _RELATIVE_MARGIN + _ABSOLUTE_MARGIN
    slope = tl.maximum(slope2, _FLATTEST)
    distance = (most - sum2 - tl.log2(1 - tl.exp2(-slope)) - log2_tolerance) / slope
    distance = tl.where(slope2 > _FLATTEST, distance, float("inf"))
    proven = distance < 1e9  # NaN compares false
    return tl.where(proven, tl.maximum(tl.ceil(distance), 0.0), 0.0).to(tl.int32) + tl.where(proven, 0, FAR)
