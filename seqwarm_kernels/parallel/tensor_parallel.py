"""Tensor parallelism of models after `apply_alibi`: each rank keeps the slopes of its heads."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from ..models.alibi_layer import AlibiHeads


class ShardSlopes(ParallelStyle):
    """Shards the slopes of a layer by heads. For `parallelize_module`, on the `alibi` modules of a converted model:

        layer = "model.layers.*.self_attn"
        plan = {f"{layer}.{name}": ColwiseParallel() for name in ("q_proj", "k_proj", "v_proj")}
        plan |= {f"{layer}.o_proj": RowwiseParallel(), f"{layer}.alibi": ShardSlopes()}
        parallelize_module(model, mesh, plan)

    The slopes become a DTensor, Shard(0), whether they are a buffer or learned. So state dicts hold a DTensor, and
    `torch.distributed.checkpoint` and its `get_model_state_dict(full_state_dict=True)` save all heads. The layer's
    local heads attend with their local slopes. Call `parallelize_module` before the optimizer is made.

    Raises:
        TypeError: The module is not an `AlibiHeads`.
        ValueError: The mesh does not divide the number of heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, AlibiHeads):
            raise TypeError(
                f"ShardSlopes must be applied to the `alibi` module of a layer after apply_alibi, got "
                f"{type(module).__name__}"
            )
        module.slopes = module.sharded_slopes(device_mesh, src_data_rank=self.src_data_rank)
        return module
