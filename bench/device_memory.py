"""On a GPU: what a plain copy moves, resize_batch beside what people write by hand, and a ramp after warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqwarm_kernels import SequenceLengthScheduler, alibi_attention, resize_batch, warmup_allocator

from .bench_resize_batch import slice_and_copy
from .device_records import DeviceRecord, Recorder, host_quartiles


def copy(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """The ceiling that everything bound by memory is compared with: bytes read and written."""
    source = torch.randn(2**12 if tiny else 2**29, device=device)
    target = torch.empty_like(source)
    megabytes = 2 * source.numel() * source.element_size() / 1e6
    recorder.measure(
        "copy",
        f"{megabytes:.0f} MB",
        "copy",
        "torch",
        lambda: (lambda: target.copy_(source), {"megabytes": megabytes}),
    )


def resize(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    cases = [(8, 128, 64)] if tiny else [(8, 128, 64), (512, 2048, 1024), (8192, 4096, 2048)]
    for rows, tokens, length in cases:
        names = ("input_ids", "attention_mask", "labels")
        batch = {name: torch.randint(1000, (rows, tokens), device=device) for name in names}
        megabytes = 2 * 3 * rows * length * 8 / 1e6
        for mode in ("truncate", "reshape"):
            case = f"{mode} 3 x {rows} x {tokens} int64 to {length}"
            for name, call in _resizers(batch, length, mode).items():
                _measure(recorder, case, name, call, megabytes, 3 if tiny else 200)


def _measure(recorder: Recorder, case: str, name: str, call: Callable[[], Any], megabytes: float, repeats: int) -> None:
    """On the device, and what the caller waits."""
    record = recorder.measure("resize_batch", case, "device", name, lambda: (call, {"megabytes": megabytes}))
    if record.problem is None:
        low, median, high = host_quartiles(call, repeats)
        recorder.add(DeviceRecord("resize_batch", case, "host", name, median, low, high))


def _resizers(batch: dict[str, Tensor], length: int, mode: str) -> dict[str, Callable[[], Any]]:
    targets = [torch.empty_like(tensor) for tensor in slice_and_copy(batch, length, mode).values()]

    def foreach() -> None:
        views = [t[:, :length] if mode == "truncate" else t.view(-1, length) for t in batch.values()]
        torch._foreach_copy_(targets, views)

    compiled = torch.compile(slice_and_copy)
    out = {name: torch.empty_like(tensor) for name, tensor in batch.items()}
    return {
        "slice + contiguous": lambda: slice_and_copy(batch, length, mode),
        "torch._foreach_copy_": foreach,
        "torch.compile": lambda: compiled(batch, length, mode),
        "resize_batch": lambda: resize_batch(batch, length, mode=mode),
        "resize_batch, out=": lambda: resize_batch(batch, length, mode=mode, out=out),
    }


class _Model(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(1000, width)
        self.projection = nn.Linear(width, 3 * width)
        self.head = nn.Linear(width, 1000)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        query, key, value = self.projection(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.head(x + alibi_attention(query, key, value).transpose(1, 2).flatten(2))


def ramp(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """Device allocations while the sequence length grows, after warmup_allocator: none is the goal."""
    longest, steps = (32, 4) if tiny else (1024, 128)
    model = _Model(64 if tiny else 768, 4 if tiny else 12).to(device, torch.float32 if tiny else torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = SequenceLengthScheduler(8, longest, duration=steps, step_size=8)
    warmup_allocator(model, longest, batch_size=4, optimizer=optimizer, scheduler=scheduler)
    before = _allocations()
    for _ in range(steps + 1):
        tokens = torch.randint(1000, (4, scheduler.seq_length), device=device)
        model(tokens).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    figures = {"device_allocations": float(_allocations() - before)}
    recorder.add(DeviceRecord("allocator", f"{steps} steps to {longest}", "ramp", "warmup_allocator", figures=figures))


def _allocations() -> int:
    return torch.cuda.memory_stats()["num_device_alloc"] if torch.cuda.is_available() else 0
