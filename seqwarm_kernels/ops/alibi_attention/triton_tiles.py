"""Device functions that forward and backward kernels share: loading tiles, visibility, bias, dropout.

All rules that hide keys (causal, window, segments, packed sequences, the ends of a tensor) become one interval
[low, high) of keys for each query, and one `center`: the key at distance zero, or the nearest key of the interval if
that key lies outside. The backward kernel that loops over queries uses the same rules for intervals of queries.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from .schema import RANGE_BLOCK

# How a tile is loaded: 16-byte vector loads through pointers, or bulk copies (TMA) through a tensor descriptor on GPUs
# that support it.
ALIGNED = tl.constexpr(1)
BULK = tl.constexpr(2)

# Which tiles a loop visits. MASKED works for any tile. LEFT and RIGHT need tiles that every row sees in full, on one
# side of every center, where the bias is linear.
MASKED = tl.constexpr(0)
LEFT = tl.constexpr(1)
RIGHT = tl.constexpr(-1)

FAR = tl.constexpr(2**30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
_RANGE_BLOCK = tl.constexpr(RANGE_BLOCK)

# The largest biases, in base 2, that linear tiles compute. Beyond the last, differences of biases may not be finite.
_LARGEST_PRECISE = tl.constexpr(2.0**12)  # where far keys may have weight
_LARGEST_SKIPPED = tl.constexpr(2.0**20)  # where a mask may hide near keys, and slopes are such that skipping pays off
_LARGEST_FINITE = tl.constexpr(1e30)
_STEEPEST_SKIPPED = tl.constexpr(16.0)
_LARGEST_FLOAT = tl.constexpr(3.4028234663852886e38)


class TileSource(NamedTuple):
    """One head of query, key, value or a gradient, from which tiles are loaded."""

    tensor: Any  # BULK: its descriptor
    batch: Any
    head: Any
    length: Any
    row_length: Any  # None: `length` counts the tokens of one row
    stride_batch: Any
    stride_head: Any
    stride_token: Any


class Keys(NamedTuple):
    """One head of keys and values, from which tiles are loaded."""

    key: Any
    value: Any
    mask: Any  # key_padding_mask of the batch row, or None
    stride_mask: Any


class Dropout(NamedTuple):
    """Arguments of dropout.py's mask, and 1 / (1 − dropout_p)."""

    seed: Any  # None: no dropout
    head_offsets: Any  # (batch, heads, 4), or None
    head: Any  # counted through batch and heads; one, or one of each query
    threshold: Any
    inverse_keep: Any
    row_length: Any  # None: all queries are of the same row; else of this head of all rows
    num_heads: Any
    query_length: Any


@triton.jit
def token_offsets(tokens, row_length, stride_batch, stride_token):
    """Offsets of tokens in memory. With a `row_length`, tokens count on from one row of the batch to the next."""
    if row_length is None:
        offsets = tokens.to(tl.int64) * stride_token
    else:
        row, token = tokens // row_length, tokens % row_length
        offsets = row.to(tl.int64) * stride_batch + token.to(tl.int64) * stride_token
    return offsets


@triton.jit
def _steps(count, stride, STEP: tl.constexpr):
    """count · stride, a multiple of STEP. AMD's buffer loads add it to offsets, where a hint on the address is lost."""
    return tl.multiple_of(count.to(tl.int64) * stride, STEP)


@triton.jit
def load_tile(
    source,
    start,
    kept,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ACCESS: tl.constexpr,
):
    """(ROWS, BLOCK_D) from row `start` on. Zeros beyond the tensor, and where `kept` (None or (ROWS,)) is False."""
    if ACCESS == BULK:
        tile = source.tensor.load([source.batch, source.head, start, 0]).reshape([ROWS, BLOCK_D])
        if kept is not None:
            tile = tl.where(kept[:, None], tile, 0.0)
    else:
        rows = start + tl.arange(0, ROWS)
        columns = tl.arange(0, BLOCK_D)
        # These hints are on results, since inlining loses those on arguments.
        STEP: tl.constexpr = 128 // source.tensor.dtype.element_ty.primitive_bitwidth
        stride_batch = source.stride_batch // STEP * STEP
        stride_token = source.stride_token // STEP * STEP
        base = source.tensor + _steps(source.head, source.stride_head, STEP)
        if source.row_length is None:
            base += _steps(source.batch, source.stride_batch, STEP)
        offsets = token_offsets(rows, source.row_length, stride_batch, stride_token)
        pointers = tl.multiple_of(base, 16) + (offsets[:, None] + columns[None, :])
        inside = rows < source.length
        if kept is not None:
            inside = inside & kept
        mask = inside[:, None]
        if HEAD_DIM < BLOCK_D:
            mask = mask & (columns < HEAD_DIM)[None, :]
        tile = tl.load(pointers, mask=mask, other=0.0)
    return tile


@triton.jit
def tile_pointers(
    tensor, batch, head, start, length, row_length, stride_batch, stride_head, stride_token,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Pointers and mask of a tile of an output, whose last dimension is dense and whose strides are multiples of
    head_dim. Offsets inside the tile of one row fit into 32 bits, which saves registers."""
    rows = tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    DENSE: tl.constexpr = HEAD_DIM * tensor.dtype.element_ty.primitive_bitwidth % 128 == 0
    STEP: tl.constexpr = 128 // tensor.dtype.element_ty.primitive_bitwidth if DENSE else 1
    base = tensor + _steps(head, stride_head, STEP)
    if row_length is None:
        base += _steps(batch, stride_batch, STEP) + _steps(start, stride_token, STEP)
        offsets = rows * ((stride_token // HEAD_DIM).to(tl.int32) * HEAD_DIM)
    else:
        steps = token_offsets(start + rows, row_length, stride_batch // HEAD_DIM, stride_token // HEAD_DIM)
        offsets = steps * HEAD_DIM
    if DENSE:
        base = tl.multiple_of(base, 16)
    mask = (start + rows < length)[:, None]
    if HEAD_DIM < BLOCK_D:
        mask = mask & (columns < HEAD_DIM)[None, :]
    return base + (offsets[:, None] + columns[None, :]), mask


@triton.jit
def store_tile(
    tensor, tile, batch, head, start, length, row_length, stride_batch, stride_head, stride_token,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    pointers, mask = tile_pointers(
        tensor, batch, head, start, length, row_length, stride_batch, stride_head, stride_token, ROWS, HEAD_DIM,
        BLOCK_D,
    )  # fmt: skip
    tl.store(pointers, tile.to(tensor.dtype.element_ty), mask=mask)


@triton.jit
def kept_keys(mask, start, length, stride, ROWS: tl.constexpr):
    """(ROWS,) bool of one row of key_padding_mask, or None without a mask."""
    kept = None
    if mask is not None:
        keys = start + tl.arange(0, ROWS)
        kept = tl.load(mask + keys.to(tl.int64) * stride, mask=keys < length, other=0) != 0
    return kept


@triton.jit
def offset_of(tokens, length, query_start, query_offset, batch, row_length, stride_start):
    """The position of the first query of each token's row."""
    if query_start is not None:
        if row_length is None:
            query_offset += tl.load(query_start + batch * stride_start)
        else:
            query_offset += tl.load(query_start + tokens // row_length * stride_start, mask=tokens < length, other=0)
    return query_offset


@triton.jit
def far_of(query_offset, query_length, key_length):
    """How far all queries of a row can be moved toward its keys without meeting one: changes no weight, and keeps the
    precision of distances. Positive if the queries come after the keys, negative if before."""
    return tl.maximum(query_offset - key_length, 0) + tl.minimum(query_offset + query_length, 0)


@triton.jit
def find_sequence(tokens, cu_seqlens, num_sequences, SEARCH_STEPS: tl.constexpr):
    """The sequence index of each token: the number of sequence ends at or before it. `num_sequences` for tokens past
    the last sequence.

    Unrolled: after a loop of unknown length the compiler forgets the alignment of addresses, and issues no
    asynchronous copies.
    """
    count = tokens * 0
    for step in tl.static_range(SEARCH_STEPS):
        candidate = count + (1 << (SEARCH_STEPS - 1 - step))
        inside = candidate <= num_sequences
        ends = tl.load(cu_seqlens + candidate, mask=inside)
        count = tl.where(inside & (ends <= tokens), candidate, count)
    return count


@triton.jit
def opposite(
    tokens,
    batch,
    own_cu_seqlens,
    other_cu_seqlens,
    num_sequences,
    other_length,
    offset,
    segment_length,
    LIMITED: tl.constexpr,
    SEARCH_STEPS: tl.constexpr,
):
    """For each token: the interval [first, end) of the other side in the same sequence or segment, the index at
    distance zero (int64, may lie outside), and the sequence of the token."""
    if own_cu_seqlens is not None:
        sequence = find_sequence(tokens, own_cu_seqlens, num_sequences, SEARCH_STEPS)
        next_sequence = tl.minimum(sequence + 1, num_sequences)  # tokens past the last sequence: an empty interval
        first = tl.load(other_cu_seqlens + sequence)
        end = tl.load(other_cu_seqlens + next_sequence)
        zero = (tokens - tl.load(own_cu_seqlens + next_sequence) + end).to(tl.int64)
    else:
        sequence = tokens * 0 + batch
        first = tokens // segment_length * segment_length if LIMITED else tokens * 0
        end = tl.minimum(first.to(tl.int64) + segment_length, other_length).to(tl.int32)
        zero = tokens.to(tl.int64) + offset
    return first, end, zero, sequence


@triton.jit
def moved_queries(sequence, query_start, cu_seqlens_q, cu_seqlens_k, num_sequences, stride_start):
    """How far query_start moves the queries of each token's packed sequence, whose last query would meet its last key;
    and `far_of` them."""
    after = tl.minimum(sequence + 1, num_sequences)
    start = tl.load(query_start + sequence * stride_start, mask=sequence < num_sequences, other=0).to(tl.int64)
    num_queries = tl.load(cu_seqlens_q + after) - tl.load(cu_seqlens_q + sequence)
    num_keys = tl.load(cu_seqlens_k + after) - tl.load(cu_seqlens_k + sequence)
    return start - (num_keys - num_queries), far_of(start, num_queries, num_keys)


@triton.jit
def slopes_of(slopes, sequence, batch, head, stride_batch, stride_head, some, PACKED: tl.constexpr):
    """Slopes in base 2: of each row, and the one shared by all rows of a tile that lies in one sequence. Without packed
    sequences both are the same number."""
    slopes += head * stride_head
    if PACKED:
        slope2 = in_base_2(tl.load(slopes + sequence * stride_batch, mask=some, other=0.0))
        shared = tl.max(tl.where(some, slope2, float("-inf")), 0)
    else:
        slope2 = in_base_2(tl.load(slopes + batch * stride_batch))
        shared = slope2
    return slope2, shared


@triton.jit
def in_base_2(slope):
    """Not infinite, since infinity · 0 is NaN."""
    slope2 = LOG2_E * slope.to(tl.float32)
    return tl.where(slope2 == float("inf"), _LARGEST_FLOAT, slope2)


@triton.jit
def scores_of(products, scale2, slope2, distance, PACKED: tl.constexpr):
    """Scores with their bias, (rows, columns). Rounded once in all kernels: where one large score has all the weight of
    a query, backward subtracts the very number that forward stored."""
    if PACKED:
        bias = -slope2[:, None] * distance
    else:
        bias = -slope2 * distance
    return tl.fma(products, scale2, bias)


@triton.jit
def visible_keys(first, end, position, window, CAUSAL: tl.constexpr, LIMITED: tl.constexpr):
    """The keys [low, high) that queries at `position` see, their center inside [first, end), and the distance from
    position to center. All keys of an interval on one side are that much farther away."""
    low = tl.maximum(position - window, first) if LIMITED else first.to(tl.int64)
    high = end.to(tl.int64)
    if CAUSAL:
        high = tl.minimum(position + 1, end)
    elif LIMITED:
        high = tl.minimum(position + window + 1, end)
    center = tl.maximum(tl.minimum(position, end - 1), first)
    beyond = tl.abs(position - center).to(tl.float32)
    return _inside(low, first, end), _inside(high, first, end), center.to(tl.int32), beyond


@triton.jit
def seen_columns(rows, columns, kept, PACKED: tl.constexpr):
    """The keys of a tile that some row sees, of those that a mask keeps (None: all)."""
    if PACKED:  # rows of several sequences
        visible = (columns[None, :] >= rows.low[:, None]) & (columns[None, :] < rows.high[:, None])
        seen = tl.max(visible.to(tl.int32), 0) > 0
    else:
        seen = (columns >= rows.begin) & (columns < rows.end)
    return seen if kept is None else seen & kept


@triton.jit
def visible_queries(first, end, zero, far, window, CAUSAL: tl.constexpr, LIMITED: tl.constexpr):
    """The queries [low, high) that see the keys whose query at distance zero is `zero`, and that query if all queries
    were nearer by `far`."""
    low = first.to(tl.int64)
    if CAUSAL:
        low = tl.maximum(zero, first)
    elif LIMITED:
        low = tl.maximum(zero - window, first)
    high = tl.minimum(zero + window + 1, end) if LIMITED else end.to(tl.int64)
    center = tl.maximum(tl.minimum(zero + far, FAR), -FAR)
    return _inside(low, first, end), _inside(high, first, end), center.to(tl.int32)


@triton.jit
def turns_of(index, center, shift, sequence, cu_seqlens, num_sequences, length, segment_length, LIMITED: tl.constexpr):
    """The queries at distance zero of the first and of the last key in the sequence or segment of each key. Queries
    beyond these count from that key in `log2_sum`, so biases of backward do, too (`turned`): they stay small.

    `shift` is the first of the two unless LIMITED, where all keys share both."""
    if cu_seqlens is not None:
        begin = tl.load(cu_seqlens + sequence)
        end = tl.load(cu_seqlens + tl.minimum(sequence + 1, num_sequences))
        first, last = center - (index - begin), center + (end - 1 - index)
    elif LIMITED:
        begin = index // segment_length * segment_length
        end = tl.minimum(begin.to(tl.int64) + segment_length, length).to(tl.int32)
        first, last = center - (index - begin), center + (end - 1 - index)
    else:
        first = shift.to(tl.int32)
        last = first + length - 1
    return first, last


@triton.jit
def turned(queries, first, last, CAUSAL: tl.constexpr, MEETS: tl.constexpr):
    """`queries` between `first` and `last`. With causal, no query before the first key sees a key. MEETS: the last
    query of each packed sequence meets its last key."""
    if not MEETS:
        queries = tl.minimum(queries, last)
    if not CAUSAL:
        queries = tl.maximum(queries, first)
    return queries


@triton.jit
def _inside(index, first, end):
    return tl.maximum(tl.minimum(index, end), first).to(tl.int32)


@triton.jit
def split(low, high, center, BLOCK: tl.constexpr):
    """Loop bounds for one tile of rows. All but the outermost two are multiples of BLOCK.

        begin <= full_begin <= near_begin < near_end <= full_end <= end

    [near_begin, near_end) holds the nearest column of every row. In [full_begin, near_begin) and [near_end, full_end)
    every row sees every column. Rows with an empty interval are ignored. If all are empty, no loop has a tile.
    """
    some = low < high
    nearest = tl.maximum(tl.minimum(center, high - 1), low)
    begin = tl.min(tl.where(some, low, FAR), 0)
    end = tl.max(tl.where(some, high, 0), 0)
    begin = tl.minimum(begin, end)
    near_begin = tl.minimum(tl.min(tl.where(some, nearest, FAR), 0), end) // BLOCK * BLOCK
    near_end = (tl.max(tl.where(some, nearest + 1, 0), 0) + BLOCK - 1) // BLOCK * BLOCK
    full_begin = (tl.max(tl.where(some, low, 0), 0) + BLOCK - 1) // BLOCK * BLOCK
    full_begin = tl.minimum(full_begin, near_begin)
    full_end = tl.min(tl.where(some, high, FAR), 0) // BLOCK * BLOCK
    full_end = tl.maximum(full_end, near_end)
    return begin, full_begin, near_begin, near_end, full_end, end


@triton.jit
def farthest(some, center, full_begin, full_end):
    """The largest distance in the tiles that every row sees."""
    return tl.max(tl.where(some, tl.maximum(center - full_begin, full_end - center), 0), 0).to(tl.float32)


@triton.jit
def is_linear(slope2, distance, MASK: tl.constexpr):
    """Whether linear biases are precise up to a distance."""
    bias = slope2 * distance
    largest = _LARGEST_FINITE
    if MASK:
        largest = tl.where(slope2 <= _STEEPEST_SKIPPED, _LARGEST_SKIPPED, _LARGEST_PRECISE)
    return (bias >= -_LARGEST_PRECISE) & (bias <= largest)


@triton.jit
def widen(linear, begin, full_begin, near_begin, near_end, full_end, end, BLOCK: tl.constexpr):
    """The bounds of `split`. Near is everything unless `linear`, so that each score gets its own bias."""
    near_begin = tl.where(linear, near_begin, tl.minimum(near_begin, begin // BLOCK * BLOCK))
    near_end = tl.where(linear, near_end, tl.maximum(near_end, tl.cdiv(end, BLOCK) * BLOCK))
    return tl.minimum(full_begin, near_begin), near_begin, near_end, tl.maximum(full_end, near_end)


@triton.jit
def store_range(ranges, block, row, begin, end, query_length, BLOCK_M: tl.constexpr):
    num_ranges = tl.cdiv(query_length, _RANGE_BLOCK)
    entries = block * (BLOCK_M // _RANGE_BLOCK) + tl.arange(0, BLOCK_M // _RANGE_BLOCK)
    pointers = ranges + (row.to(tl.int64) * num_ranges + entries) * 2
    tl.store(pointers, begin, mask=entries < num_ranges)
    tl.store(pointers + 1, end, mask=entries < num_ranges)


@triton.jit
def attended_keys(ranges, block, row, query_length, BLOCK_M: tl.constexpr):
    num_ranges = tl.cdiv(query_length, _RANGE_BLOCK)
    ENTRIES: tl.constexpr = (BLOCK_M + _RANGE_BLOCK - 1) // _RANGE_BLOCK
    entries = block * BLOCK_M // _RANGE_BLOCK + tl.arange(0, ENTRIES)
    pointers = ranges + (row.to(tl.int64) * num_ranges + entries) * 2
    begin = tl.min(tl.load(pointers, mask=entries < num_ranges, other=FAR), 0)
    end = tl.max(tl.load(pointers + 1, mask=entries < num_ranges, other=0), 0)
    return begin, end


@triton.jit
def kept_weights(dropout, queries, start, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) bool: the weights that dropout keeps, of `queries` and the keys from `start` on. `start` and
    row_length are multiples of 4."""
    keys = start + 4 * tl.arange(0, COLUMNS // 4)
    head = dropout.head
    if dropout.row_length is not None:
        queries = tl.minimum(queries, dropout.query_length - 1)  # what comes after has no weights
        keys = keys % dropout.row_length
        head += queries // dropout.row_length * dropout.num_heads
        queries = queries % dropout.row_length
    key = (keys // 4)[None, :].to(tl.uint32)
    query = queries.to(tl.uint32)
    seed = dropout.seed
    if dropout.head_offsets is not None:
        entry = dropout.head_offsets + head.to(tl.int64) * 4
        seed = tl.broadcast_to(tl.load(entry), [ROWS])[:, None]
        head = tl.load(entry + 1)
        query += tl.load(entry + 2).to(tl.uint32)
        key += tl.broadcast_to(tl.load(entry + 3) // 4, [ROWS])[:, None].to(tl.uint32)
    head = tl.broadcast_to(head, [ROWS])[:, None].to(tl.uint32)
    bits0, bits1, bits2, bits3 = tl.philox(seed, key, query[:, None], head, 0)
    even, odd = tl.join(bits0, bits2), tl.join(bits1, bits3)  # (..., 4 keys as 2 x 2)
    return tl.join(even, odd).reshape([ROWS, COLUMNS]) >= dropout.threshold
