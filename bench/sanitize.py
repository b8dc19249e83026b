"""One small call of every kernel, for compute-sanitizer to watch: `compute-sanitizer python -m bench.sanitize`."""

from __future__ import annotations

from typing import Any

import torch

from seqwarm_kernels import alibi_attention, alibi_attention_varlen, resize_batch


def attention(device: str, **options: Any) -> None:
    query = torch.randn(2, 2, 600, 64, device=device, dtype=torch.float16, requires_grad=True)
    key = torch.randn(2, 1, 600, 64, device=device, dtype=torch.float16, requires_grad=True)
    alibi_attention(query, key, key, **options).sum().backward()


def packed(device: str) -> None:
    cu_seqlens = torch.tensor([0, 30, 30, 170], dtype=torch.int32, device=device)
    query = torch.randn(180, 2, 64, device=device, dtype=torch.float16, requires_grad=True)
    alibi_attention_varlen(query, query, query, cu_seqlens, cu_seqlens, 140, 140).sum().backward()


def main() -> None:
    device = "cuda"
    slopes = torch.tensor([0.5, 1.0], device=device, requires_grad=True)
    attention(device, slopes=slopes)
    attention(device, slopes=slopes, causal=False, window=100)
    attention(device, segment_length=7)
    attention(device, key_padding_mask=torch.rand(2, 600, device=device) > 0.3, dropout_p=0.1)
    packed(device)
    batch = {"input_ids": torch.arange(70, device=device).view(7, 10), "labels": torch.ones(7, 10, device=device)}
    for mode in ("truncate", "reshape", "flatten"):
        resize_batch(batch, 4, mode=mode, return_info=True)
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
