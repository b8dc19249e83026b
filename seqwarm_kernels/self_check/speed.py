"""Times attention and resize_batch at three sizes, beside the same in plain PyTorch and a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.benchmark import Timer
from tqdm import tqdm

from ..attention.functional import alibi_attention
from ..attention.slopes import alibi_bias, alibi_slopes
from ..resizing.functional import resize_batch
from ..utils.progress import standard_error

SIZES = ((8, 128), (4, 512), (2, 1024))  #: batch size and length
_HEADS, _HEAD_DIM = 8, 64
_SECONDS = 0.1  # of each measurement, after a warm-up


def time_all() -> Iterator[dict[str, Any]]:
    """Times on the GPU in bfloat16 where there is one, else on the CPU in float32: medians by implementation."""
    device, dtype = ("cuda", torch.bfloat16) if torch.cuda.is_available() else ("cpu", torch.float32)
    for batch_size, length in tqdm(SIZES, desc="timing", leave=False, file=standard_error()):
        yield from time_attention(batch_size, length, device, dtype)
        yield time_resizing(batch_size, length, device)


def time_attention(batch_size: int, length: int, device: str, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    shape = batch_size, _HEADS, length, _HEAD_DIM
    tensors = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    query, key, value = tensors
    slopes = alibi_slopes(_HEADS, device=device)
    bias = alibi_bias(slopes, length, length).to(dtype)[None]
    attends: dict[str, Callable[[], Tensor]] = {
        "seqwarm_kernels": lambda: alibi_attention(query, key, value, slopes),
        "SDPA, bias as mask": lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=bias),
        "eager": lambda: (query @ key.mT * _HEAD_DIM**-0.5 + bias).softmax(-1) @ value,
    }
    what = f"attention, {batch_size} x {_HEADS} x {length} x {_HEAD_DIM}, {str(dtype).removeprefix('torch.')}"
    with torch.no_grad():
        yield _timed(f"{what}, forward", {**attends, "copy": lambda: torch.stack(tensors)})
    backward = {
        name: lambda attend=attend: torch.autograd.grad(attend().sum(), tensors) for name, attend in attends.items()
    }
    yield _timed(f"{what}, with backward", backward)


def time_resizing(batch_size: int, length: int, device: str) -> dict[str, Any]:
    """Three tensors, cut to half of their length."""
    tensors = [torch.zeros(batch_size, length, dtype=torch.long, device=device) for _ in range(3)]
    batch = dict(zip("abc", tensors, strict=True))
    calls = {
        "seqwarm_kernels": lambda: resize_batch(batch, length // 2),
        "eager": lambda: [tensor[:, : length // 2].contiguous() for tensor in tensors],
        "copy": lambda: torch.stack(tensors),
    }
    return _timed(f"resize_batch, 3 x {batch_size} x {length} to {length // 2}, int64", calls)


def _timed(case: str, calls: Mapping[str, Callable[..., object]]) -> dict[str, Any]:
    def milliseconds(call: Callable[..., object]) -> float:
        timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
        return 1e3 * timer.blocked_autorange(min_run_time=_SECONDS).median

    return {"case": case, "milliseconds": {name: milliseconds(call) for name, call in calls.items()}}
