"""ALiBi attention over rows whose tokens are sharded over ranks. Only the keys and values that can matter travel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from ..attention.calls import DEFAULT_SKIP_TOLERANCE, DenseCall, VarlenCall, check_dense, check_varlen
from ..attention.context_parallel import refuse_unordered_shards
from ..ops.alibi_attention.dropout import dropout_offsets
from ..ops.alibi_attention.schema import DenseOptions
from ..ops.alibi_attention.validation import check_cu_seqlens, check_query_key_value, check_sequences
from ..ops.call_key import is_readable
from ..utils.checks import check_int
from .checks import check_dropout, check_halo_of_heads, check_local, check_mesh, check_same_length
from .halo import Halo, Shared, exchange
from .halo_width import choose_widths
from .parts import Part, Shard

#: Attends the rows of a part to its keys and values (B, H, S, D) and mask (B, Sk): out (B, Hq, Sq, D), lse (B, Hq, Sq).
_Attend = Callable[[Part, Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]


def context_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    slopes: Tensor | None = None,
    *,
    mesh: DeviceMesh,
    halo: int | Sequence[int] | None = None,
    causal: bool = True,
    scale: float | None = None,
    segment_length: int | None = None,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:  # one tensor, or two with return_lse; a union would burden every caller
    """`alibi_attention` over rows whose tokens are sharded over the ranks of `mesh`: context parallelism.

    Rank r holds the tokens r · c to (r + 1) · c − 1 of every row. A rank receives only the keys and values next to its
    shard that can weigh more than `skip_tolerance` for one of its queries: the halo. Its width depends on slopes and
    norms, not on the length of the rows. In backward the gradients of the halo travel back.

    All ranks must call it, with the same shapes and options. Outputs and gradients are those of the rank's tokens.
    Gradients of slopes are partial sums: the gradient is their sum over the ranks, as for all other parameters of a
    model whose tokens are sharded.

    Args:
        query: (B, Hq, c, D), this rank's tokens.
        key: (B, Hkv, c, D).
        value: (B, Hkv, c, D).
        slopes: (Hq,) or (B, Hq). Default: `alibi_slopes(Hq)`. Heads with slopes near 0 or below reach all tokens: their
            keys and values come from all ranks.
        mesh: One dimension, such as `device_mesh["context"]`, with ranks in ascending order, which is that of their
            tokens.
        halo: Width of the halo in tokens: one for all key heads, or one for each. It may be larger than c. Default: the
            narrowest multiples of 64 that fit. The host then waits for them in each call, which torch.compile cannot.
            A given halo that is too narrow fails an assertion on the device. `halo_widths` finds the widths of an
            example.
        causal: As for `alibi_attention`, as are scale, window, skip_tolerance, return_lse and backend.
        segment_length: As for `alibi_attention`. If it divides c, nothing is exchanged.
        key_padding_mask: (B, c) bool, True where a key is attended. A query at a masked position is taken for padding:
            its output lacks keys that no other query needs.
        dropout_p: As for `alibi_attention`. The mask is that of one device whose seed is the largest of the ranks'
            seeds. c and segment_length must be multiples of 4.

    Returns:
        out (B, Hq, c, D); with return_lse also lse (B, Hq, c).

    Raises:
        TypeError, ValueError: An argument does not fit. The message names it. Raised before anything is sent.
        RuntimeError: `halo` is too narrow, or the ranks hold different numbers of tokens. Both are seen where the ranks
            compare norms: not if nothing is exchanged, or a given `halo` holds all tokens.

    Source of the bound: docs/kernels/skipping.md. The halo has half of skip_tolerance, the kernels have the other half.
    """
    refuse_unordered_shards()
    check_mesh(mesh)
    check_local("query", query)
    call = DenseCall(
        query,
        key,
        value,
        slopes,
        causal=causal,
        scale=scale,
        segment_length=segment_length,
        window=window,
        key_padding_mask=key_padding_mask,
        dropout_p=dropout_p,
        skip_tolerance=skip_tolerance,
        return_lse=return_lse,
        backend=backend,
    )
    operator, (query, key, value, slopes), options = check_dense(call)
    check_same_length(query, key, 2)
    shard = Shard(key.shape[2], mesh.get_local_rank(), mesh.size(), causal, segment_length)
    check_dropout(shard, dropout_p)
    widths = _dense_widths(query, key, slopes, options, shard, check_halo_of_heads(halo, key.shape[1]), mesh)
    seed = _common_seed(options.dropout_seed, mesh)

    def attend(part: Part, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        of_part = options._replace(
            key_padding_mask=mask,
            dropout_seed=None if seed is None else _head_offsets(seed, query, shard, part),
            query_offset=part.first_row - part.first_key,
            segment_length=part.segment_length,
            skip_tolerance=skip_tolerance / 2,
        )
        out, lse, *_ = operator(query, key, value, slopes, *of_part)
        return out, lse

    parts = shard.parts(max(widths))
    out, lse = _attend_parts(parts, widths, mesh, causal, (query, key, value), key_padding_mask, attend)
    return (out, lse) if return_lse else out


def context_attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    slopes: Tensor | None = None,
    *,
    mesh: DeviceMesh,
    halo: int | Sequence[int] | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    dropout_p: float = 0.0,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
    return_lse: bool = False,
    backend: str | None = None,
) -> Any:  # one tensor, or two with return_lse; a union would burden every caller
    """`context_attention` over packed sequences. Rank r holds the packed tokens r · c to (r + 1) · c − 1.

    A sequence may lie on several ranks. Options, gradients and errors are those of `context_attention`.

    Args:
        query: (c, Hq, D), this rank's tokens.
        key: (c, Hkv, D).
        value: (c, Hkv, D).
        cu_seqlens: (B + 1,) int32, the boundaries of the sequences in the tokens of all ranks, starting with 0, not
            decreasing. The outputs of tokens past the last entry are zero. Values are checked on a CPU.
        max_seqlen: At least the length of the longest sequence.
        slopes: (Hq,), or (B, Hq) by sequence. Default: `alibi_slopes(Hq)`.

    Returns:
        out (c, Hq, D); with return_lse also lse (Hq, c).
    """
    refuse_unordered_shards()
    check_mesh(mesh)
    check_local("query", query)
    check_query_key_value(query, key, value, "(tokens, heads, head_dim)")
    check_cu_seqlens("cu_seqlens", cu_seqlens, query)
    check_int("max_seqlen", max_seqlen, minimum=0)
    check_same_length(query, key, 0)
    shard = Shard(key.shape[0], mesh.get_local_rank(), mesh.size(), causal)
    if is_readable(cu_seqlens):
        check_sequences("cu_seqlens", cu_seqlens, shard.length * shard.size, "all ranks", max_seqlen)
    local = _boundaries(cu_seqlens, shard.start, shard.length)
    call = VarlenCall(
        query,
        key,
        value,
        slopes,
        local,
        local,
        max_seqlen,
        max_seqlen,
        causal=causal,
        scale=scale,
        window=window,
        dropout_p=dropout_p,
        skip_tolerance=skip_tolerance,
        return_lse=return_lse,
        backend=backend,
    )
    operator, (query, key, value, slopes), options = check_varlen(call)
    check_dropout(shard, dropout_p)
    query, key, value = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))  # one row, heads first
    is_token = torch.arange(shard.start, shard.end, device=query.device) < cu_seqlens[-1]
    widths = choose_widths(
        query,
        key,
        slopes if slopes.dim() == 1 else functional.pad(slopes, (0, 0, 0, 1), value=math.inf).amin(0),
        is_token[None],
        scale=options.scale,
        skip_tolerance=skip_tolerance / 2,
        halo=check_halo_of_heads(halo, key.shape[1]),
        widest=min(shard.widest(window), max(max_seqlen - 1, 0)),
        causal=causal,
        mesh=mesh,
    )
    seed = _common_seed(options.dropout_seed, mesh)

    def attend(part: Part, query: Tensor, key: Tensor, value: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
        # The last query of a sequence meets its last key: where keys go on after the rows, so must the queries.
        rows, keys = query.shape[2], key.shape[2]
        query = functional.pad(query, (0, 0, 0, part.end_key - part.end_row))
        of_part = options._replace(
            cu_seqlens_q=_boundaries(cu_seqlens, shard.start + part.first_row, query.shape[2]),
            cu_seqlens_k=_boundaries(cu_seqlens, shard.start + part.first_key, keys),
            dropout_seed=None if seed is None else _head_offsets(seed, query, shard, part)[0],
            max_seqlen_q=min(max_seqlen, query.shape[2]),
            max_seqlen_k=min(max_seqlen, keys),
            skip_tolerance=skip_tolerance / 2,
        )
        packed = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        out, lse, *_ = operator(*packed, slopes, *of_part)
        return out[:rows].transpose(0, 1)[None], lse[None, :, :rows]

    parts = shard.parts(max(widths), split=causal)
    out, lse = _attend_parts(parts, widths, mesh, causal, (query, key, value), None, attend)
    out, lse = out[0].transpose(0, 1), lse[0]
    return (out, lse) if return_lse else out


def halo_widths(
    query: Tensor,
    key: Tensor,
    slopes: Tensor | None = None,
    *,
    mesh: DeviceMesh,
    causal: bool = True,
    scale: float | None = None,
    segment_length: int | None = None,
    window: int | None = None,
    key_padding_mask: Tensor | None = None,
    skip_tolerance: float = DEFAULT_SKIP_TOLERANCE,
) -> list[int]:
    """The `halo` that `context_attention` chooses for these inputs: tokens for each key head, in multiples of 64.

    It is the same on all ranks, which must all call this function. The host waits for the result. Other queries and
    keys may need more: leave a margin, or take the largest of several batches. c, the shard's length, times the number
    of other ranks means all tokens.

    Args:
        query: As for `context_attention`, as are all others.
    """
    check_mesh(mesh)
    check_local("query", query)
    call = DenseCall(
        query,
        key,
        key,  # values do not matter
        slopes,
        causal=causal,
        scale=scale,
        segment_length=segment_length,
        window=window,
        key_padding_mask=key_padding_mask,
        skip_tolerance=skip_tolerance,
    )
    _, (query, key, _, slopes), options = check_dense(call)
    check_same_length(query, key, 2)
    shard = Shard(key.shape[2], mesh.get_local_rank(), mesh.size(), causal, segment_length)
    return _dense_widths(query, key, slopes, options, shard, None, mesh)


def _dense_widths(
    query: Tensor,
    key: Tensor,
    slopes: Tensor,
    options: DenseOptions,
    shard: Shard,
    halo: list[int] | None,
    mesh: DeviceMesh,
) -> list[int]:
    return choose_widths(
        query,
        key,
        slopes,
        options.key_padding_mask,
        scale=options.scale,
        skip_tolerance=options.skip_tolerance / 2,
        halo=halo,
        widest=shard.widest(options.window),
        causal=options.causal,
        mesh=mesh,
    )


def _attend_parts(
    parts: list[Part],
    widths: list[int],
    mesh: DeviceMesh,
    causal: bool,
    tensors: Sequence[Tensor],
    mask: Tensor | None,
    attend: _Attend,
) -> tuple[Tensor, Tensor]:
    """Exchange the halo, and attend the parts. Those with local keys only come first, while it travels."""
    query, key, value = tensors
    width = max(widths)
    local = [key, value] if mask is None else [key, value, mask[:, None, :, None].to(key.dtype)]
    halos: list[Halo | None] = [None] * len(local)
    if width:
        shared = [Shared(key, widths), Shared(value, widths), *(Shared(tensor, [width]) for tensor in local[2:])]
        halos = [*exchange(shared, mesh, causal=causal)]
    done: dict[int, tuple[Tensor, Tensor]] = {}
    for index in sorted(range(len(parts)), key=lambda index: parts[index].with_halo):
        part = parts[index]
        keys, values, *masks = (_keys(part, tensor, halo) for tensor, halo in zip(local, halos, strict=True))
        rows = query[:, :, part.first_row : part.end_row]
        done[index] = attend(part, rows, keys, values, masks[0][:, 0, :, 0] > 0 if masks else None)
    if len(parts) == 1:
        return done[0]
    outs, lses = zip(*(done[index] for index in range(len(parts))), strict=True)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _keys(part: Part, local: Tensor, halo: Halo | None) -> Tensor:
    length = local.shape[2]
    inside = local[:, :, max(part.first_key, 0) : min(part.end_key, length)]
    if halo is None or not part.with_halo:
        return inside
    return halo.around(inside, max(-part.first_key, 0), max(part.end_key - length, 0))


def _boundaries(cu_seqlens: Tensor, start: int, length: int) -> Tensor:
    """The boundaries of the sequences in `length` packed tokens from `start` on."""
    return cu_seqlens.clamp(start, start + length) - start


def _common_seed(seed: Tensor | None, mesh: DeviceMesh) -> Tensor | None:
    return None if seed is None else collectives.all_reduce(seed, "max", mesh)


def _head_offsets(seed: Tensor, query: Tensor, shard: Shard, part: Part) -> Tensor:
    batch_size, num_heads, *_ = query.shape
    return dropout_offsets(seed, batch_size, num_heads, shard.start + part.first_row, shard.start + part.first_key)
