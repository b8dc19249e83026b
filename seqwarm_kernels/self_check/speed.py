"""Times attention and resize_batch at three sizes, beside the same in plain PyTorch and a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

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
IMPLEMENTATIONS = ("seqwarm_kernels", "SDPA, bias as mask", "eager", "copy")
_HEADS, _HEAD_DIM = 8, 64
_SECONDS = 0.1  # of each measurement, after a warm-up


@dataclass(frozen=True)
class TimedCase:
    case: str
    milliseconds: dict[str, float]  #: the median, by implementation


def time_all() -> Iterator[TimedCase]:
    """Times on the GPU in bfloat16 where there is one, else on the CPU in float32."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for batch_size, length in tqdm(SIZES, desc="timing", leave=False, file=standard_error()):
        yield from time_attention(batch_size, length, device)
        yield time_resizing(batch_size, length, device)


def time_attention(batch_size: int, length: int, device: str) -> Iterator[TimedCase]:
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = batch_size, _HEADS, length, _HEAD_DIM
    tensors = [torch.randn(shape, device=device, dtype=dtype).requires_grad_() for _ in range(3)]
    query, key, value = tensors
    slopes = alibi_slopes(_HEADS, device=device)
    bias = alibi_bias(slopes, length, length).to(dtype)[None]

    attends: dict[str, Callable[[], Tensor]] = {
        "seqwarm_kernels": lambda: alibi_attention(query, key, value, slopes),
        "SDPA, bias as mask": lambda: F.scaled_dot_product_attention(query, key, value, attn_mask=bias),
        "eager": lambda: (query @ key.mT * _HEAD_DIM**-0.5 + bias).softmax(-1) @ value,
        "copy": lambda: torch.stack(tensors),
    }
    with torch.no_grad():
        times = {name: _milliseconds(attend) for name, attend in attends.items()}
    what = f"attention, {batch_size} x {_HEADS} x {length} x {_HEAD_DIM}, {str(dtype).removeprefix('torch.')}"
    yield TimedCase(f"{what}, forward", times)
    del attends["copy"]
    times = {
        name: _milliseconds(lambda attend=attend: torch.autograd.grad(attend().sum(), tensors))  # type: ignore[misc]
        for name, attend in attends.items()
    }
    yield TimedCase(f"{what}, with backward", times)


def time_resizing(batch_size: int, length: int, device: str) -> TimedCase:
    """Three tensors, cut to half of their length."""
    tensors = [torch.zeros(batch_size, length, dtype=torch.long, device=device) for _ in range(3)]
    batch = dict(zip("abc", tensors, strict=True))
    calls = {
        "seqwarm_kernels": lambda: resize_batch(batch, length // 2),
        "eager": lambda: [tensor[:, : length // 2].contiguous() for tensor in tensors],
        "copy": lambda: torch.stack(tensors),
    }
    times = {name: _milliseconds(call) for name, call in calls.items()}
    return TimedCase(f"resize_batch, 3 x {batch_size} x {length} to {length // 2}, int64", times)


def _milliseconds(call: Callable[[], object]) -> float:
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return 1e3 * timer.blocked_autorange(min_run_time=_SECONDS).median
