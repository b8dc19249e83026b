"""Host side of the Triton kernels: from an operator's arguments to launches.

A kernel is compiled for each head_dim and each set of dtypes and flags, and once more for short rows, which share
tiles; on Hopper also for rows of 65 to 128 tokens and for long ones. Other numbers cause no other compilation. All
arguments of launches but tensors and query_offset are computed once for each key of a call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import backends
from ..call_key import CallCache, call_key
from ..library import LIBRARY, shorten
from ..triton_launch import DISPATCH_KEY, Launch, on
from .schema import DenseOptions, VarlenOptions, allocate_like, allocate_outputs
from .triton_arguments import (
    LONGEST_SEGMENT,
    UNBOUNDED,
    allocate,
    contiguous,
    has_head_offsets,
    mask_strides,
    precision_of,
    query_offset_of,
    row_strides,
    shell_of,
    start_stride,
    strides_named,
    sum_slopes,
)
from .triton_backward_key import backward_key_kernel
from .triton_backward_query import backward_query_kernel
from .triton_configurations import Configuration, Tiles, block_d, chip_of, configuration
from .triton_decode import Decode, decodes
from .triton_forward import forward_kernel
from .triton_ranges import KeyNorms, KeyRanges, as_dense, hides_keys, log2_tolerance, programs_of, skips
from .triton_reach import NORM_BLOCK
from .triton_readers import Reader, is_aligned, strides_of
from .triton_short import ShortBackward, ShortForward, is_short
from .triton_tiles import ALIGNED, BULK
from .validation import check_values

try:
    from . import gluon
except ImportError:  # Gluon is experimental, and versions of Triton that have other names take the other kernels
    gluon = None  # type: ignore[assignment]

_SEARCH_STEPS = (8, 16, 31)  # few values, since each is another compilation

_Options = DenseOptions | VarlenOptions


def _access(query: Tensor, key: Tensor, mask: Tensor | None) -> int:
    """How kernels load tiles. Bulk copies need distinct memory for every row, and cannot mask single rows."""
    if mask is not None or query.element_size() != 2 or not chip_of(query.device).copies_in_bulk:
        return ALIGNED.value
    return BULK.value if query.numel() and key.numel() else ALIGNED.value


def _packing(options: _Options) -> dict[str, int]:
    if not isinstance(options, VarlenOptions):
        return {"num_sequences": 0, "SEARCH_STEPS": 0}
    count = options.cu_seqlens_q.numel() - 1
    return {"num_sequences": count, "SEARCH_STEPS": next(steps for steps in _SEARCH_STEPS if count < 2**steps)}


def _is_limited(options: _Options) -> bool:
    """Whether a window, segments or packed sequences limit the keys of a query."""
    dense = as_dense(options)
    return dense.window is not None or dense.segment_length is not None or isinstance(options, VarlenOptions)


def _constant(query: Reader, key: Reader, value: Reader, slopes: Tensor, options: _Options) -> dict[str, Any]:
    """The arguments that forward and backward kernels share, and that are the same in all calls with one key."""
    dense = as_dense(options)
    _, num_heads, query_length, head_dim = query.sizes
    _, num_key_heads, key_length, _ = key.sizes
    return {
        **_packing(options),
        "window": UNBOUNDED if dense.window is None else min(dense.window, UNBOUNDED),
        "scale": dense.scale,
        "inverse_keep": 1 / (1 - dense.dropout_p),
        "dropout_threshold": int(dense.dropout_p * 2**32),
        "segment_length": min(dense.segment_length or LONGEST_SEGMENT, LONGEST_SEGMENT),
        "num_heads": num_heads,
        "group_size": num_heads // num_key_heads,
        "query_length": query_length,
        "key_length": key_length,
        "stride_start": start_stride(dense.query_start),
        **mask_strides(dense.key_padding_mask),
        "stride_slope_b": 0 if slopes.dim() == 1 else slopes.stride(0),
        "stride_slope_h": slopes.stride(-1),
        **strides_named("q", query.strides),
        **strides_named("k", key.strides),
        **strides_named("v", value.strides),
        "CAUSAL": dense.causal,
        "LIMITED": _is_limited(options),
        "HEAD_OFFSETS": has_head_offsets(dense.dropout_seed),
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d(head_dim),
    }


def _options_read(slopes: Tensor, options: _Options) -> tuple[Tensor | None, ...]:
    """The slopes and the tensors among the options, in the order of the kernels' arguments."""
    slopes = slopes.float()
    if isinstance(options, DenseOptions):
        query_start, mask, dropout_seed, *_ = options
        return slopes, query_start, mask, contiguous(dropout_seed), None, None
    cu_seqlens_q, cu_seqlens_k, dropout_seed, *_ = options
    ends = cu_seqlens_q.contiguous(), cu_seqlens_k.contiguous()
    return slopes, options.query_start, None, contiguous(dropout_seed), *ends


def _tiled(tiles: Tiles) -> dict[str, int]:
    return {
        "BLOCK_M": tiles.block_m,
        "BLOCK_N": tiles.block_n,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _configuration(query: Tensor, key: Tensor, options: _Options) -> Configuration:
    mask = as_dense(options).key_padding_mask
    plain = mask is None and options.dropout_seed is None and not hides_keys(options, query, key)
    light = plain and not _is_limited(options) and _access(query, key, mask) == BULK.value
    return configuration(chip_of(query.device), query.shape[-1], query.element_size(), plain=plain, light=light)


class Forward:
    """Forward of calls with one key."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: _Options) -> None:
        mask = as_dense(options).key_padding_mask
        access = _access(query, key, mask)
        tiles = _configuration(query, key, options).forward
        skipping = skips(options, query, key)
        read = functools.partial(Reader, access=access)
        self._readers = read(query), read(key), read(value)
        rows = (tiles.block_m, tiles.block_n, tiles.block_n)
        self._tiles = tuple(reader.tiles(count) for reader, count in zip(self._readers, rows, strict=True))
        self._key_norms = KeyNorms(self._readers[1], mask) if skipping else None
        hides, chip = hides_keys(options, query, key), chip_of(query.device)
        self._clears = hides or isinstance(options, VarlenOptions)
        outputs = allocate_outputs(shell_of(query))
        self._shells = [*outputs, self._key_norms.shell] if self._key_norms else outputs
        self._launch = Launch(
            forward_kernel,
            programs_of(self._readers[0].sizes, tiles.block_m),
            log2_tolerance=log2_tolerance(options, query, key),
            **_constant(*self._readers, slopes.float(), options),
            **strides_named("o", strides_of(outputs[0])),
            **_tiled(tiles),
            ACCESS=access,
            PRECISION=precision_of(query.dtype),
            NORM_BLOCK=NORM_BLOCK,
            HIDES=hides,
            BOUNDS=chip.is_hopper and chip.copies_in_bulk,  # elsewhere not yet measured, and it may spill
        )

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: _Options
    ) -> tuple[Tensor, ...]:
        out, lse, log2_sum, ranges, *key_norms = allocate(self._shells, query.device)
        read_query, read_key, read_value = self._readers
        query, key, value = read_query(query), read_key(key), read_value(value)
        of_query, of_key, of_value = self._tiles
        read = _options_read(slopes, options)
        with on(query.device):
            if self._key_norms:
                self._key_norms(key, as_dense(options).key_padding_mask, *key_norms)
            self._launch(
                of_query(query),
                of_key(key),
                of_value(value),
                value if self._clears else None,
                *read,
                *(key_norms or read[:1]),  # any tensor in place of norms, of which nothing is read
                out,
                lse,
                log2_sum,
                ranges,
                query_offset_of(options),
            )
        return out, lse, log2_sum, ranges


class Backward:
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
        options: _Options,
    ) -> None:
        access = _access(query, key, as_dense(options).key_padding_mask)
        configuration = _configuration(query, key, options)
        skipping = skips(options, query, key)
        read = functools.partial(Reader, access=access)
        readers = _, of_query, of_key, _ = read(grad_out), read(query), read(key), read(value)
        rows = torch.empty(lse.shape, dtype=lse.dtype, device="meta")
        results = [allocate_like(shell_of(tensor)) for tensor in (query, key, value)]
        last = rows if slopes_need_grad else slopes.new_empty(0, device="meta")
        self._shells = [*results, rows, rows, last]
        of_grad_query, of_grad_key, of_grad_value = map(strides_of, results)
        self._readers = readers
        self._copies_out = strides_of(out) != of_grad_query or not is_aligned(out)
        shared = {
            **strides_named("g", readers[0].strides),
            **_constant(*readers[1:], slopes.float(), options),
            "ACCESS": access,
            "PRECISION": precision_of(query.dtype),
        }
        tiles = configuration.backward_query
        self._query_tiles = _tiles_of_all(readers, tiles)
        self._query_launch = Launch(
            backward_query_kernel,
            programs_of(of_query.sizes, tiles.block_m),
            **shared,
            **row_strides(grad_lse),
            **strides_named("o", of_grad_query),
            **_tiled(tiles),
            HIDES=hides_keys(options, query, key),
        )
        tiles = configuration.backward_key
        self._key_tiles = _tiles_of_all(readers, tiles)
        self._key_ranges = KeyRanges(of_query, of_key, tiles.block_n) if skipping else None
        if self._key_ranges:
            self._shells.append(self._key_ranges.shell)
        self._key_launch = Launch(
            backward_key_kernel,
            programs_of(of_key.sizes, tiles.block_n),
            skips=int(skipping),
            BLIND=shared["LIMITED"] or _hides_keys(as_dense(options)),
            **shared,
            **strides_named("o", of_grad_key),
            **strides_named("w", of_grad_value),
            **_tiled(tiles),
        )

    def __call__(self, tensors: tuple[Any, ...], options: _Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        grad_out, grad_lse, out, _, log2_sum, ranges, slopes_need_grad, query, key, value, slopes = tensors
        log2_sum, ranges = log2_sum.contiguous(), ranges.contiguous()
        grad_query, grad_key, grad_value, lse2, delta, grad_slopes, *key_ranges = allocate(self._shells, query.device)
        if self._copies_out:
            out = allocate_like(query).copy_(out)
        rows = [reader(tensor) for reader, tensor in zip(self._readers, (grad_out, query, key, value), strict=True)]
        read, offset = _options_read(slopes, options), query_offset_of(options)
        with on(query.device):
            if query.numel():
                grad_out, *inputs = [tiles(tensor) for tiles, tensor in zip(self._query_tiles, rows, strict=True)]
                self._query_launch(
                    grad_out,
                    grad_lse,
                    out,
                    log2_sum,
                    ranges,
                    *inputs,
                    *read,
                    delta,
                    lse2,
                    grad_query,
                    grad_slopes if slopes_need_grad else None,
                    offset,
                )
            if key.numel():
                grad_out, *inputs = [tiles(tensor) for tiles, tensor in zip(self._key_tiles, rows, strict=True)]
                if self._key_ranges:
                    self._key_ranges(ranges, *key_ranges)
                ranges = key_ranges[0] if key_ranges else ranges
                self._key_launch(grad_out, lse2, delta, ranges, *inputs, *read, grad_key, grad_value, offset)
        if slopes_need_grad:
            grad_slopes = sum_slopes(grad_slopes, slopes, options)
        return grad_query, grad_key, grad_value, grad_slopes


def _hides_keys(options: DenseOptions) -> bool:
    """Whether a query may see no key, apart from windows and segments."""
    begins_before = options.query_start is not None or options.query_offset < 0
    return options.key_padding_mask is not None or (options.causal and begins_before)


def _tiles_of_all(readers: tuple[Reader, ...], tiles: Tiles) -> list[Callable[[Tensor], Any]]:
    """What kernels take for grad_out, query, key and value."""
    rows = (tiles.block_m, tiles.block_m, tiles.block_n, tiles.block_n)
    return [reader.tiles(count) for reader, count in zip(readers, rows, strict=True)]


_known: CallCache[Any] = CallCache()


def _known_call(make: Callable[..., Any], arguments: tuple[Any, ...], options: _Options, *more: Any) -> Any:
    """`make(*arguments, options)`, once for each key of a call. `more` is part of the key."""
    fixed: tuple[Any, ...] = options
    if isinstance(options, DenseOptions):  # of query_offset only whether some queries are before all keys
        fixed = *options[:3], options.query_offset < 0, *options[4:]
    fixed = *fixed, hides_keys(options, *arguments[-4:-2])
    cache_key = call_key(
        make.__name__, type(options).__name__, precision_of(arguments[0].dtype), *arguments, *fixed, *more
    )
    call = _known.get(cache_key)
    if call is None:
        call = make(*arguments, options)
        _known.remember(cache_key, call)
    return call


def _forward_of(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: Any) -> Any:
    make: Any = Forward
    if decodes(query, key, options):
        make = Decode
    elif is_short(query, key, slopes, options):
        make = ShortForward
    elif gluon is not None and gluon.has_forward(query, key, options):
        make = gluon.GluonForward
    return make(query, key, value, slopes, options)


def _backward_of(*described: Any) -> Any:
    query, key, _, slopes, options = described[-5:]
    make: Any = Backward
    if is_short(query, key, slopes, options):
        make = ShortBackward
    elif gluon is not None and gluon.has_backward(query, key, options):
        make = gluon.GluonBackward
    elif is_short(query, key, slopes, options, longer=True):
        make = ShortBackward
    return make(*described)


def forward(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, options: _Options) -> tuple[Tensor, ...]:
    check_values(query, key, options)
    if query.numel() == 0:
        return allocate_outputs(query)
    tensors = query, key, value, slopes
    return _known_call(_forward_of, tensors, options)(*tensors, options)


def backward(tensors: tuple[Any, ...], options: _Options) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_out, grad_lse, out, lse, log2_sum, ranges, slopes_need_grad, *inputs = tensors
    described = grad_out, grad_lse, out, lse, slopes_need_grad, *inputs
    return _known_call(_backward_of, described, options, log2_sum, ranges)(tensors, options)


def _dense(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return forward(query, key, value, slopes, DenseOptions(*rest))


def _varlen(query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return forward(query, key, value, slopes, VarlenOptions(*rest))


_NUM_TENSORS = 11  # arguments of backward before the options


def _dense_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return backward(arguments[:_NUM_TENSORS], DenseOptions(*arguments[_NUM_TENSORS:]))


def _varlen_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return backward(arguments[:_NUM_TENSORS], VarlenOptions(*arguments[_NUM_TENSORS:]))


#: Names, and the kernels of forward and backward.
OPERATORS = (
    ("alibi_attention", _dense, _dense_backward),
    ("alibi_attention_varlen", _varlen, _varlen_backward),
)

for _name, _forward, _backward in OPERATORS:
    LIBRARY.impl(f"{_name}.triton", _forward, DISPATCH_KEY)
    LIBRARY.impl(f"{_name}_backward.triton", _backward, DISPATCH_KEY)
    if backends.module is not None:
        in_python = getattr(backends.module, f"{_name}_in_python")
        shorten(_name, "triton", in_python(_forward, _backward))
