"""Host side of the Triton kernels: from an operator's arguments to launches.

A kernel is compiled for each head_dim and each set of dtypes and flags. Lengths and other numbers never cause another
compilation.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ..library import LIBRARY
from ..triton_launch import DISPATCH_KEY, on
from .schema import DenseOptions, VarlenOptions, allocate_like, allocate_outputs
from .triton_backward_key import backward_key_kernel
from .triton_backward_query import backward_query_kernel
from .triton_backward_ranges import RANGE_CHUNK, RANGE_TILES, backward_ranges_kernel
from .triton_configurations import BULK_COPIES, Configuration, Tiles, block_d, configuration
from .triton_forward import forward_kernel
from .triton_reach import NORM_BLOCK, NORM_ROWS, key_norms_kernel
from .triton_tiles import ALIGNED, BULK

#: With fewer visible keys, finding keys to skip costs more than it saves.
MIN_KEYS_TO_SKIP = 512
#: With fewer queries for each key head too: the largest norms are found by reading all keys once.
MIN_QUERIES_TO_SKIP = 256

_UNBOUNDED = 2**40
_LONGEST_SEGMENT = 2**31 - 1
_ALIGNMENT = 16  # bytes
_SEARCH_STEPS = (8, 16, 31)  # few values, since each is another compilation

_Four = tuple[int, int, int, int]  # batch, head, token, dim
_Options = DenseOptions | VarlenOptions


def sizes_of(tensor: Tensor) -> _Four:
    """Batch, heads, tokens, dim. Packed sequences (tokens, heads, dim) are a batch of one."""
    if tensor.dim() == 4:
        return tuple(tensor.shape)  # type: ignore[return-value]
    tokens, heads, dim = tensor.shape
    return 1, heads, tokens, dim


def strides_of(tensor: Tensor) -> _Four:
    if tensor.dim() == 4:
        return tensor.stride()  # type: ignore[return-value]
    token, head, dim = tensor.stride()
    return 0, head, token, dim


def is_aligned(tensor: Tensor) -> bool:
    """Whether kernels can read the rows of `tensor` in blocks of 16 bytes."""
    step = _ALIGNMENT // tensor.element_size()
    strides = [stride for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if size > 1]
    rows_are_dense = tensor.stride(-1) == 1 or tensor.shape[-1] == 1
    return rows_are_dense and tensor.data_ptr() % _ALIGNMENT == 0 and not any(stride % step for stride in strides)


def _readable(tensor: Tensor, access: int) -> Tensor:
    """`tensor` itself if kernels can read it, else a copy whose rows are padded to blocks of 16 bytes."""
    repeats = any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    if is_aligned(tensor) and not (repeats and access == BULK.value):
        return tensor
    step = _ALIGNMENT // tensor.element_size()
    head_dim = tensor.shape[-1]
    padded = tensor.new_empty((*tensor.shape[:-1], triton.cdiv(head_dim, step) * step))
    return padded[..., :head_dim].copy_(tensor)


def _access(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """How kernels load tiles. Bulk copies need distinct memory for every row, and cannot mask single rows."""
    if mask is not None or query.element_size() != 2 or _capability(query.device) not in BULK_COPIES:
        return ALIGNED.value
    return BULK.value if query.numel() and key.numel() else ALIGNED.value


def _tiles_of(tensor: Tensor, rows: int, access: int) -> Tensor | TensorDescriptor:
    """`tensor`, or for bulk copies its descriptor for tiles of `rows` tokens."""
    if access != BULK.value:
        return tensor
    step = _ALIGNMENT // tensor.element_size()
    sizes = sizes_of(tensor)
    strides = [stride if size > 1 else step for stride, size in zip(strides_of(tensor), sizes, strict=True)]
    return TensorDescriptor(tensor, list(sizes), [*strides[:3], 1], [1, 1, rows, block_d(sizes[3])])


def _strides(name: str, tensor: Tensor) -> dict[str, int]:
    batch, head, row, _ = strides_of(tensor)
    return {f"stride_{name}b": batch, f"stride_{name}h": head, f"stride_{name}s": row}


def _mask_strides(mask: Tensor | None) -> dict[str, int]:
    stride_batch, stride_key = (0, 0) if mask is None else mask.stride()
    return {"stride_mb": stride_batch, "stride_ms": stride_key}


def _as_dense(options: _Options) -> DenseOptions:
    """The options that dense and packed calls share."""
    if isinstance(options, DenseOptions):
        return options
    _, _, seed, _, _, causal, scale, window, dropout_p, skip_tolerance = options
    return DenseOptions(None, None, seed, 0, causal, scale, None, window, dropout_p, skip_tolerance)


def skips(options: _Options, query: Tensor, key: Tensor) -> bool:
    """Whether the kernels look for keys to skip."""
    _, num_heads, query_length, _ = sizes_of(query)
    _, num_key_heads, key_length, _ = sizes_of(key)
    dense = _as_dense(options)
    visible = [key_length]
    if isinstance(options, VarlenOptions):
        visible.append(options.max_seqlen_k)
    if dense.segment_length is not None:
        visible.append(dense.segment_length)
    if dense.window is not None:
        visible.append(dense.window if dense.causal else 2 * dense.window)
    queries = query_length * (num_heads // num_key_heads)
    return dense.skip_tolerance > 0 and min(visible) >= MIN_KEYS_TO_SKIP and queries >= MIN_QUERIES_TO_SKIP


def _packing(options: _Options) -> dict[str, Any]:
    if not isinstance(options, VarlenOptions):
        return {"cu_seqlens_q": None, "cu_seqlens_k": None, "num_sequences": 0, "SEARCH_STEPS": 0}
    num_sequences = options.cu_seqlens_q.numel() - 1
    return {
        "cu_seqlens_q": options.cu_seqlens_q.contiguous(),
        "cu_seqlens_k": options.cu_seqlens_k.contiguous(),
        "num_sequences": num_sequences,
        "SEARCH_STEPS": next(steps for steps in _SEARCH_STEPS if num_sequences < 2**steps),
    }


def _shared(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: _Options) -> dict[str, Any]:
    """The arguments that forward and backward kernels share."""
    dense = _as_dense(options)
    _, num_heads, query_length, head_dim = sizes_of(query)
    _, num_key_heads, key_length, _ = sizes_of(key)
    start = dense.query_start
    return {
        "slopes": slopes,
        "query_start": start,
        "key_padding_mask": dense.key_padding_mask,
        "dropout_seed": dense.dropout_seed,
        **_packing(options),
        "query_offset": max(-_UNBOUNDED, min(_UNBOUNDED, dense.query_offset)),
        "window": _UNBOUNDED if dense.window is None else min(dense.window, _UNBOUNDED),
        "scale": dense.scale,
        "inverse_keep": 1 / (1 - dense.dropout_p),
        "dropout_threshold": int(dense.dropout_p * 2**32),
        "segment_length": min(dense.segment_length or _LONGEST_SEGMENT, _LONGEST_SEGMENT),
        "num_heads": num_heads,
        "group_size": num_heads // num_key_heads,
        "query_length": query_length,
        "key_length": key_length,
        "stride_start": start.stride(0) if start is not None and start.numel() > 1 else 0,
        **_mask_strides(dense.key_padding_mask),
        "stride_slope_b": 0 if slopes.dim() == 1 else slopes.stride(0),
        "stride_slope_h": slopes.stride(-1),
        **_strides("q", query),
        **_strides("k", key),
        **_strides("v", value),
        "CAUSAL": dense.causal,
        "LIMITED": dense.window is not None or dense.segment_length is not None or isinstance(options, VarlenOptions),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
        "PRECISION": _precision(query.dtype),
    }


def _precision(dtype: torch.dtype) -> str:
    """Of products. 16-bit kernels do not depend on it, and are not compiled again when TF32 is allowed."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def _tiled(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _programs(tensor: Tensor, rows: int) -> tuple[int]:
    batch_size, num_heads, length, _ = sizes_of(tensor)
    return (batch_size * num_heads * triton.cdiv(length, rows),)


def _capability(device: torch.device) -> int:
    if device.type == "cpu":  # the interpreter supports every way to load a tile
        return BULK_COPIES.start
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def _configuration(query: Tensor, options: _Options) -> Configuration:
    plain = _as_dense(options).key_padding_mask is None and options.dropout_seed is None
    return configuration(_capability(query.device), query.shape[-1], query.element_size(), plain=plain)


def _key_norms(key: Tensor, mask: Tensor | None) -> Tensor:
    """(batch · heads · blocks) float32: the largest squared norm of the unmasked keys of each block of NORM_BLOCK."""
    _, num_heads, length, head_dim = sizes_of(key)
    programs = _programs(key, NORM_BLOCK)
    norms = key.new_empty(programs, dtype=torch.float32)
    key_norms_kernel[programs](
        key=key,
        key_padding_mask=mask,
        norms=norms,
        num_heads=num_heads,
        key_length=length,
        **_strides("k", key),
        **_mask_strides(mask),
        HEAD_DIM=head_dim,
        BLOCK_D=block_d(head_dim),
        ACCESS=ALIGNED.value,
        NORM_BLOCK=NORM_BLOCK,
        ROWS=NORM_ROWS,
        num_warps=4,
    )
    return norms


def forward(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: _Options) -> tuple[Tensor, ...]:
    out, lse, log2_sum, ranges = allocate_outputs(query)
    if query.numel() == 0:
        return out, lse, log2_sum, ranges
    mask = _as_dense(options).key_padding_mask
    access = _access(query, key, mask)
    query, key, value = _readable(query, access), _readable(key, access), _readable(value, access)
    tiles = _configuration(query, options).forward
    tolerance = options.skip_tolerance * (1.0 if options.causal else 0.5)
    skipping = skips(options, query, key)
    with on(query.device):
        forward_kernel[_programs(query, tiles.block_m)](
            query=_tiles_of(query, tiles.block_m, access),
            key=_tiles_of(key, tiles.block_n, access),
            value=_tiles_of(value, tiles.block_n, access),
            packed_value=value if isinstance(options, VarlenOptions) else None,
            norms=_key_norms(key, mask) if skipping else lse,
            out=out,
            lse=lse,
            log2_sum=log2_sum,
            ranges=ranges,
            log2_tolerance=math.log2(tolerance) if skipping else -math.inf,
            **_shared(query, key, value, slopes.float(), options),
            **_strides("o", out),
            **_tiled(tiles),
            ACCESS=access,
            NORM_BLOCK=NORM_BLOCK,
        )
    return out, lse, log2_sum, ranges


def backward(tensors: tuple[Any, ...], options: _Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_lse, out, lse, log2_sum, ranges, slopes_need_grad, query, key, value, slopes = tensors
    grad_query, grad_key, grad_value = allocate_like(query), allocate_like(key), allocate_like(value)
    lse2, delta = torch.empty_like(lse), torch.empty_like(lse)
    grad_slope_rows = torch.empty_like(lse) if slopes_need_grad else None
    if out.stride() != grad_query.stride():
        out = allocate_like(query).copy_(out)
    access = _access(query, key, _as_dense(options).key_padding_mask)
    query, key, value, grad_out = (_readable(tensor, access) for tensor in (query, key, value, grad_out))
    tiles = _configuration(query, options)
    skipping = skips(options, query, key)
    shared = {
        "lse2": lse2,
        "delta": delta,
        **_strides("g", grad_out),
        **_shared(query, key, value, slopes.float(), options),
        "ACCESS": access,
    }
    with on(query.device):
        if query.numel():
            of_query, of_key = tiles.backward_query.block_m, tiles.backward_query.block_n
            backward_query_kernel[_programs(query, of_query)](
                grad_out=_tiles_of(grad_out, of_query, access),
                query=_tiles_of(query, of_query, access),
                key=_tiles_of(key, of_key, access),
                value=_tiles_of(value, of_key, access),
                grad_lse=grad_lse,
                out=out,
                log2_sum=log2_sum,
                ranges=ranges,
                grad_query=grad_query,
                grad_slope_rows=grad_slope_rows,
                **shared,
                **_row_strides(grad_lse),
                **_strides("o", grad_query),
                **_tiled(tiles.backward_query),
            )
        if key.numel():
            of_query, of_key = tiles.backward_key.block_m, tiles.backward_key.block_n
            backward_key_kernel[_programs(key, of_key)](
                grad_out=_tiles_of(grad_out, of_query, access),
                query=_tiles_of(query, of_query, access),
                key=_tiles_of(key, of_key, access),
                value=_tiles_of(value, of_key, access),
                key_ranges=_key_ranges(ranges, query, key, of_key) if skipping else ranges,
                grad_key=grad_key,
                grad_value=grad_value,
                skips=int(skipping),
                **shared,
                **_strides("o", grad_key),
                **_tiled(tiles.backward_key),
            )
    grad_slopes = slopes.new_empty(0) if grad_slope_rows is None else _sum_slopes(grad_slope_rows, slopes, options)
    return grad_query, grad_key, grad_value, grad_slopes


def _key_ranges(ranges: Tensor, query: Tensor, key: Tensor, rows: int) -> Tensor:
    """(batch · heads, tiles of `rows` keys, 2) int32: the range of queries that attended each tile of keys."""
    batch_size, num_heads, query_length, _ = sizes_of(query)
    key_length = sizes_of(key)[2]
    num_tiles = triton.cdiv(key_length, rows)
    key_ranges = ranges.new_empty((batch_size * num_heads, num_tiles, 2))
    backward_ranges_kernel[(batch_size * num_heads * triton.cdiv(num_tiles, RANGE_TILES),)](
        ranges,
        key_ranges,
        query_length,
        key_length,
        BLOCK_N=rows,
        TILES=RANGE_TILES,
        CHUNK=RANGE_CHUNK,
        num_warps=4,
    )
    return key_ranges


def _row_strides(rows: Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if rows is None else (0, *rows.stride())[-3:]
    return dict(zip(("stride_lb", "stride_lh", "stride_ls"), strides, strict=True))


def _sum_slopes(rows: Tensor, slopes: Tensor, options: _Options) -> Tensor:
    """Sum the contributions of queries, (B, Hq, Sq) or (Hq, Tq), to the slopes' shape, in a fixed order."""
    if rows.dim() == 3:
        total = rows.sum(-1)
        return (total if slopes.dim() == 2 else total.sum(0)).to(slopes.dtype)
    if slopes.dim() == 1 or not isinstance(options, VarlenOptions):
        return rows.sum(-1).to(slopes.dtype)
    by_sequence = torch.segment_reduce(rows.T.contiguous(), "sum", offsets=options.cu_seqlens_q.long(), axis=0)
    return by_sequence.to(slopes.dtype)


def _dense(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return forward(query, key, value, slopes, DenseOptions(*rest))


def _varlen(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return forward(query, key, value, slopes, VarlenOptions(*rest))


_NUM_TENSORS = 11  # arguments of backward before the options


def _dense_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return backward(arguments[:_NUM_TENSORS], DenseOptions(*arguments[_NUM_TENSORS:]))


def _varlen_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return backward(arguments[:_NUM_TENSORS], VarlenOptions(*arguments[_NUM_TENSORS:]))


for _name, _function in {
    "alibi_attention": _dense,
    "alibi_attention_backward": _dense_backward,
    "alibi_attention_varlen": _varlen,
    "alibi_attention_varlen_backward": _varlen_backward,
}.items():
    LIBRARY.impl(f"{_name}.triton", _function, DISPATCH_KEY)
