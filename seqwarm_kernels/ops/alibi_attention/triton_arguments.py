"""Arguments of launches that the Triton kernels of attention share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import backends
from .schema import FARTHEST_POSITION, DenseOptions, VarlenOptions
from .triton_readers import Four

UNBOUNDED = 2 * FARTHEST_POSITION  # a window that no distance exceeds
LONGEST_SEGMENT = 2**31 - 1


def shell_of(tensor: Tensor) -> Tensor:
    """A tensor of the same dtype and device without memory."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _allocate(shells: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Uninitialized tensors like `shells`; without the module for this torch."""
    return [torch.empty_strided(shell.shape, shell.stride(), dtype=shell.dtype, device=device) for shell in shells]


allocate = _allocate if backends.module is None else backends.module.allocate


def strides_named(name: str, strides: Four) -> dict[str, int]:
    batch, head, row, _ = strides
    return {f"stride_{name}b": batch, f"stride_{name}h": head, f"stride_{name}s": row}


def mask_strides(mask: Tensor | None) -> dict[str, int]:
    stride_batch, stride_key = (0, 0) if mask is None else mask.stride()
    return {"stride_mb": stride_batch, "stride_ms": stride_key}


def start_stride(start: Tensor | None) -> int:
    """Of query_start: 0 if all rows share one start, or have none."""
    return start.stride(0) if start is not None and start.numel() > 1 else 0


def query_offset_of(options: DenseOptions | VarlenOptions) -> int:
    return options.query_offset if isinstance(options, DenseOptions) else 0


def contiguous(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def has_head_offsets(dropout_seed: Tensor | None) -> bool:
    """Whether each head has its own seed and offsets (dropout.py)."""
    return dropout_seed is not None and dropout_seed.dim() > 0


def precision_of(dtype: torch.dtype) -> str:
    """Of products. 16-bit kernels do not depend on it, and are not compiled again when TF32 is allowed."""
    if dtype != torch.float32 or backends.IS_HIP:  # gfx950 has no TF32
        return "ieee"
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def row_strides(rows: Tensor | None) -> dict[str, int]:
    strides = (0, 0, 0) if rows is None else (0, *rows.stride())[-3:]
    return dict(zip(("stride_lb", "stride_lh", "stride_ls"), strides, strict=True))


def sum_slopes(rows: Tensor, slopes: Tensor, options: DenseOptions | VarlenOptions) -> Tensor:
    """Sum the contributions of queries, (B, Hq, Sq) or (Hq, Tq), to the slopes' shape, in a fixed order."""
    if rows.dim() == 3:
        total = rows.sum(-1)
        return (total if slopes.dim() == 2 else total.sum(0)).to(slopes.dtype)
    if slopes.dim() == 1 or not isinstance(options, VarlenOptions):
        return rows.sum(-1).to(slopes.dtype)
    by_sequence = torch.segment_reduce(rows.T.contiguous(), "sum", offsets=options.cu_seqlens_q.long(), axis=0)
    return by_sequence.to(slopes.dtype)
