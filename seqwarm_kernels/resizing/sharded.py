"""A call of `resize_batch` on DTensors whose rows are sharded: each rank resizes its rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..ops.resize_batch.schema import Kind, new_rows
from ..utils.checks import is_dtensor
from .checked_call import CheckedCall, Options, check_call, repeated
from .packing import packed_bounds


def holds_dtensors(entries: Mapping[str, Any], keys: Collection[str] | None) -> bool:
    """Whether DTensors are among the tensors to resize."""
    return any(is_dtensor(entry) and entry.dim() and (keys is None or name in keys) for name, entry in entries.items())


@dataclass(frozen=True)
class ShardedCall:
    """`call` is that of the whole batch, `sharding` a `RowSharding`."""

    call: CheckedCall
    sharding: Any

    def run(
        self, entries: Mapping[str, Any], seq_len: int, copy: bool, out: Mapping[str, Tensor] | None, return_info: bool
    ) -> tuple[dict[str, Any], tuple[int, int], list[Tensor]]:
        """As `CheckedCall.run`. The fields of `ResizeInfo` are DTensors, the number of tokens a sum over ranks.

        Raises:
            ValueError: New rows would hold tokens of two ranks, or `out` is given.
        """
        call, sharding = self.call, self.sharding
        if out is not None:
            raise ValueError("out must be None for a batch of DTensors: their storage is that of each rank")
        length = min(seq_len, call.source_length)
        sharding.check_new_rows(call.rule, call.batch_size, call.source_length, length)
        names = _tensors_of(call)
        local = {name: entry.to_local() if name in names else entry for name, entry in entries.items()}
        first, kind = local[call.names[0]], call.kinds[0]
        rows_of_rank = first.shape[0 if kind == Kind.SQUARE else sharding.row_dim(first.dim())]
        of_rank = replace(call, batch_size=rows_of_rank, row_lists=[])
        resized, _, info = of_rank.run(local, seq_len, copy, None, return_info)
        rows = new_rows(call.batch_size, call.source_length, length, call.rule)
        for name in call.names:
            resized[name] = sharding.distributed(resized[name], rows, sharding.row_dim(entries[name].dim()))
        for name in call.row_lists:
            resized[name] = repeated(entries[name], rows // max(call.batch_size, 1))
        if info:
            valid_lengths, position_ids, num_valid_tokens = info
            info = [sharding.distributed(each, rows) for each in (valid_lengths, position_ids)]
            info.append(sharding.distributed_sum(num_valid_tokens))
        return resized, (rows, length) if call.seq_dim == 1 else (length, rows), info


def _tensors_of(call: CheckedCall) -> list[str]:
    """Names of the tensors that the call resizes, then of other masks that it reads."""
    read = [call.mask_name, *call.masks_of_one_cut, *call.real_masks]
    return list(dict.fromkeys([*call.names, *(name for name in read if name is not None)]))


def sharded_call(
    entries: Mapping[str, Any],
    options: Options,
    pad_values: Mapping[str, float] | None,
    keys: Collection[str] | None,
    mask_keys: Collection[str] | None,
) -> ShardedCall:
    """
    Raises:
        TypeError: Some tensors are DTensors, and others are not, or as `cached_call`.
        ValueError: The batch is packed, or the DTensors are not placed alike, by rows or replicated, or as
            `cached_call`.
    """
    from ..ops.resize_batch.sharding import RowSharding  # loads torch.distributed.tensor

    local = {name: entry.to_local() if is_dtensor(entry) else entry for name, entry in entries.items()}
    if packed_bounds(local, options.seq_dim) is not None:
        raise ValueError(
            "batch must not be packed if it holds DTensors: a packed row cannot be sharded by rows; resize it before "
            "it is distributed"
        )
    call = check_call(entries, options, pad_values, keys, mask_keys, dtensors=True)
    return ShardedCall(call, RowSharding({name: entries[name] for name in _tensors_of(call)}, options.seq_dim))
