"""Backward, first kernel: delta, the term that all score gradients of a query share."""

from __future__ import annotations

import triton.language as tl

from ..triton_launch import kernel
from .triton_tiles import ALIGNED, head_of, load_tile, tile_pointers

TERM_ROWS = 32


@kernel
def backward_terms_kernel(
    grad_out,
    grad_lse,  # None: zeros
    out,
    lse,
    delta,
    num_heads: tl.int32,
    query_length: tl.int32,
    stride_gb: tl.int64,
    stride_gh: tl.int64,
    stride_gs: tl.int64,
    stride_lb: tl.int64,
    stride_lh: tl.int64,
    stride_ls: tl.int64,
    stride_ob: tl.int64,
    stride_oh: tl.int64,
    stride_os: tl.int64,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """delta = Σ dO ∘ O − dlse, where Σ dO ∘ O = Σ P ∘ dP."""
    num_blocks = tl.cdiv(query_length, ROWS)
    program = tl.program_id(0)
    start = program % num_blocks * ROWS
    head = program // num_blocks % num_heads
    batch = program // num_blocks // num_heads

    source = head_of(grad_out, batch, head, query_length, stride_gb, stride_gh, stride_gs, ALIGNED)
    grad_tile = load_tile(source, start, None, ROWS, HEAD_DIM, BLOCK_D, ALIGNED)
    pointers, inside = tile_pointers(
        out, batch, head, start, query_length, stride_ob, stride_oh, stride_os, ROWS, HEAD_DIM, BLOCK_D
    )
    out_tile = tl.load(pointers, mask=inside, other=0.0)
    index = start + tl.arange(0, ROWS)
    present = index < query_length
    row_offset = (batch * num_heads + head).to(tl.int64) * query_length + index
    row_delta = tl.sum(out_tile.to(tl.float32) * grad_tile.to(tl.float32), 1)
    if grad_lse is not None:
        seen = tl.load(lse + row_offset, mask=present, other=float("-inf")) != float("-inf")
        grad_lse += batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
        row_delta -= tl.load(grad_lse + index.to(tl.int64) * stride_ls, mask=seen, other=0.0)
    tl.store(delta + row_offset, row_delta, mask=present)
