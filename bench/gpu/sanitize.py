"""One small call of every kernel, for compute-sanitizer: `compute-sanitizer python -m bench.gpu.sanitize`."""

from __future__ import annotations

from typing import Any

import torch

from seqwarm_kernels import BatchBuffers, alibi_attention, alibi_attention_varlen, resize_batch
from seqwarm_kernels.ops.backends import why_not
from seqwarm_kernels.ops.library import overload
from seqwarm_kernels.self_check.calls import METHODS, MOMENT_SIZES


def attention(device: str, dtype: torch.dtype, length: int, **options: Any) -> None:
    query = torch.randn(2, 2, length, 64, device=device).to(dtype).requires_grad_()
    key = torch.randn(2, 1, length, 64, device=device).to(dtype).requires_grad_()
    value = torch.randn(2, 1, length, 64, device=device).to(dtype).requires_grad_()
    alibi_attention(query, key, value, **options).sum().backward()


def packed(device: str, dtype: torch.dtype) -> None:
    cu_seqlens = torch.tensor([0, 30, 30, 170], dtype=torch.int32, device=device)
    query, key, value = (torch.randn(180, 2, 64, device=device).to(dtype).requires_grad_() for _ in range(3))
    alibi_attention_varlen(query, key, value, cu_seqlens, cu_seqlens, 140, 140).sum().backward()


def resize(device: str) -> None:
    batch = {
        "input_ids": torch.arange(70, device=device).view(7, 10),
        "attention_mask": torch.arange(70, device=device).view(7, 10) % 3 > 0,
        "embeddings": torch.ones(7, 10, 24, device=device, dtype=torch.bfloat16),
        "labels": torch.ones(7, 10, device=device),
        **{f"tensor_{index}": torch.ones(7, 10, device=device) for index in range(30)},
    }
    for backend in ("native", "triton"):
        if why_not("resize_batch", backend, device) is None:
            for options in METHODS.values():
                resize_batch(batch, 4, return_info=True, backend=backend, **options)
            if device == "cuda":
                pinned = {name: tensor.cpu().pin_memory() for name, tensor in batch.items()}
                resize_batch(pinned, 4, out=BatchBuffers(pinned, 4, device=device), backend=backend)
            print(f"ran resize_batch {backend}", flush=True)


def moments(device: str) -> None:
    """Small and large tensors of several dtypes."""
    for backend in ("native", "triton"):
        if why_not("moment_statistics", backend, device) is None:
            for dtype in (torch.float32, torch.bfloat16):
                tensors = [torch.ones(size, device=device, dtype=dtype) for size in MOMENT_SIZES]
                overload("moment_statistics", backend)(tensors, tensors, tensors)
            print(f"ran moment_statistics {backend}", flush=True)


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device, dtype, length = ("cuda", torch.bfloat16, 600) if on_gpu else ("cpu", torch.float32, 60)
    slopes = torch.tensor([0.5, 1.0], device=device, requires_grad=True)
    shown = (torch.arange(length, device=device) % 3 > 0).expand(2, length)
    calls: list[dict[str, Any]] = [
        {"slopes": slopes},
        {"slopes": slopes, "causal": False, "window": 100},
        {"segment_length": 7},
        {"key_padding_mask": shown},
        {"dropout_p": 0.1},
    ]
    for options in calls:
        attention(device, dtype, length, **options)
        print("ran", *options, flush=True)
    packed(device, dtype)
    resize(device)
    moments(device)
    if on_gpu:
        torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
