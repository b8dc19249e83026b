"""Batches of DTensors: each rank resizes its rows, without an exchange.

Not by `register_sharding`: the operator takes the number of rows as a number, which is another one on each rank. What
is here serves all backends. Importing this module loads torch.distributed.tensor, which takes half a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard


class RowSharding:
    """How the rows of a batch are sharded over the ranks of a mesh.

    Args:
        tensors: Those that are resized, (B, S, ...) or (B,). The name of each tells messages apart.
        seq_dim: 1, or 0 for (S, B, ...).

    Raises:
        TypeError: One of the tensors is not a DTensor.
        ValueError: They are on several meshes, placed in different ways, or not sharded by rows or replicated.
    """

    def __init__(self, tensors: Mapping[str, Tensor], seq_dim: int) -> None:
        self._seq_dim = seq_dim
        first: Any = None
        for name, tensor in tensors.items():
            if not isinstance(tensor, DTensor):
                raise TypeError(
                    f"batch[{name!r}] must be a DTensor if other tensors are, got a plain tensor: distribute it, too, "
                    "or resize the to_local() of the others"
                )
            first = first or (name, tensor.device_mesh)
            is_sharded = tuple(self._is_by_rows(name, tensor, placement) for placement in tensor.placements)
            if tensor.device_mesh != first[1] or is_sharded != getattr(self, "_is_sharded", is_sharded):
                raise ValueError(
                    f"batch[{name!r}] must have the mesh and the placements of batch[{first[0]!r}], got "
                    f"{tensor.placements} on {tensor.device_mesh}"
                )
            self._is_sharded = is_sharded
        self._mesh = first[1]
        self._ranks = math.prod(self._mesh.size(dim) for dim, is_sharded in enumerate(self._is_sharded) if is_sharded)

    def check_new_rows(self, rule: str, rows: int, source_length: int, new_length: int) -> None:
        """Each rank's rows must give its part of the new rows.

        Raises:
            ValueError: They do not.
        """
        if self._ranks == 1 or rule.startswith("truncate"):
            return
        if rows % self._ranks:
            raise ValueError(
                f"batch must have a multiple of {self._ranks} rows to be cut into further rows, one part for each rank "
                f"that its rows are sharded over, got {rows}"
            )
        tokens = rows // self._ranks * source_length
        if rule == "flatten" and tokens % new_length:
            raise ValueError(
                f"seq_len must divide the {tokens} tokens of each rank for mode='flatten' of sharded rows, got "
                f"{new_length}: a new row would hold tokens of two ranks"
            )

    def distributed(self, local: Tensor, rows: int, row_dim: int = 0) -> Tensor:
        """The DTensor of which each rank holds its rows, with `rows` in all."""
        shape = list(local.shape)
        shape[row_dim] = rows
        stride = torch.empty(shape, device="meta").stride()
        placements = [Shard(row_dim) if is_sharded else Replicate() for is_sharded in self._is_sharded]
        return self._from_local(local, placements, shape=torch.Size(shape), stride=stride)

    def distributed_sum(self, local: Tensor) -> Tensor:
        """The DTensor that is the sum over the ranks' rows."""
        return self._from_local(local, [Partial() if is_sharded else Replicate() for is_sharded in self._is_sharded])

    def row_dim(self, dimensions: int) -> int:
        """The dimension of rows of a tensor in the batch with so many dimensions."""
        return 0 if dimensions == 1 else 1 - self._seq_dim

    def _from_local(self, local: Tensor, placements: list[Any], **sizes: Any) -> Tensor:
        return DTensor.from_local(local, self._mesh, placements, run_check=False, **sizes)

    def _is_by_rows(self, name: str, tensor: DTensor, placement: Placement) -> bool:
        if type(placement) is Replicate:
            return False
        if type(placement) is Shard and placement.dim == self.row_dim(tensor.dim()):
            return True
        tokens = type(placement) is Shard and tensor.dim() > 1 and placement.dim == self._seq_dim
        advice = ": resize the batch before its tokens are sharded by seqwarm_kernels.parallel.shard_sequence"
        raise ValueError(
            f"batch[{name!r}] must be replicated or sharded in its rows, Shard({self.row_dim(tensor.dim())}), got the "
            f"placements {tensor.placements}{advice if tokens else ''}"
        )
