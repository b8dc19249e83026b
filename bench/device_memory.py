"""On a GPU: what a plain copy moves, resize_batch beside what people write by hand, and a ramp after warm-up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from seqwarm_kernels import SequenceLengthScheduler, alibi_attention, resize_batch, warmup_allocator

from .bench_resize_batch import slice_and_copy
from .device_records import DeviceRecord, Recorder
from .timing import Call, device_allocations, host_time, launches, triton_compilations

Batch = dict[str, Tensor]


def copy(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    """The ceiling of everything bound by memory: bytes read and written."""
    source = torch.randn(2**12 if tiny else 2**28, device=device)
    target = torch.empty_like(source)
    megabytes = 2 * source.numel() * source.element_size() / 1e6
    figures = {"moved_megabytes": megabytes}
    recorder.measure("copy", f"{megabytes:.0f} MB", "copy", "torch", lambda: (lambda: target.copy_(source), figures))


def resize(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    cases = [(8, 128, 64)] if tiny else [(8, 128, 64), (8192, 4096, 2048), (512, 2048, 1024)]
    for rows, tokens, length in cases:
        names = ("input_ids", "attention_mask", "labels")
        batch = {name: torch.randint(1000, (rows, tokens), device=device) for name in names}
        for mode in ("truncate", "reshape"):
            kept = length if mode == "truncate" else tokens
            facts = {"rows": rows, "tokens": tokens, "length": length, "mode": mode}
            for name, make in _resizers(batch, length, mode).items():
                _resize(recorder, facts, name, make, 2 * 3 * rows * kept * 8 / 1e6, 5 if tiny else 200)


def _resize(
    recorder: Recorder, facts: dict[str, Any], name: str, make: Callable[[], Call], megabytes: float, repeats: int
) -> None:
    """On the device, and what the caller waits."""
    case = "{mode} 3 x {rows} x {tokens} int64 to {length}".format(**facts)

    def measured() -> tuple[Call, dict[str, float]]:
        call, figures = make(), {"moved_megabytes": megabytes}
        if (count := launches(call)) is not None:
            figures["launches"] = count
        if not torch.cuda.is_available():
            return call, figures
        waited = host_time(call, repeats)
        torch.cuda.synchronize()
        return call, {**figures, "wait_ms": waited.median}

    recorder.measure("resize_batch", case, "resize", name, measured, facts=facts)


def _resizers(batch: Batch, length: int, mode: str) -> dict[str, Callable[[], Call]]:
    """Ours first. `foreach` writes into storage that is there already, as `out=` does."""

    def foreach() -> Call:
        targets = [torch.empty_like(tensor) for tensor in slice_and_copy(batch, length, mode).values()]

        def call() -> None:
            views = [t[:, :length] if mode == "truncate" else t.view(-1, length) for t in batch.values()]
            torch._foreach_copy_(targets, views)

        return call

    def compiled() -> Call:
        torch._dynamo.reset()
        function = torch.compile(slice_and_copy, dynamic=False)
        return lambda: function(batch, length, mode)

    def out() -> Call:
        storage = {name: torch.empty_like(tensor) for name, tensor in batch.items()}
        return lambda: resize_batch(batch, length, mode=mode, out=storage)

    return {
        "resize_batch": lambda: lambda: resize_batch(batch, length, mode=mode),
        "resize_batch, out=": out,
        "slice + contiguous": lambda: lambda: slice_and_copy(batch, length, mode),
        "torch._foreach_copy_": foreach,
        "torch.compile": compiled,
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
    """Device allocations and compilations while the length grows, after warmup_allocator and without it."""
    longest, steps, batch_size = (32, 4, 2) if tiny else (1024, 128, 8)
    for warmed in (True, False):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        model = _Model(64 if tiny else 768, 4 if tiny else 12).to(device, torch.float32 if tiny else torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters())
        scheduler = SequenceLengthScheduler(8, longest, duration=steps, step_size=8)
        batches = torch.randint(1000, (steps + 1, batch_size, longest), device=device)
        if warmed:
            warmup_allocator(
                model, longest, example_batch=batches[0], loss_fn=_loss, optimizer=optimizer, scheduler=scheduler
            )
        before = device_allocations()
        with triton_compilations() as compiled:
            for batch in batches:
                _loss(model(scheduler.resize({"tokens": batch})["tokens"])).backward()
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        figures = {"device_allocations": float(device_allocations() - before)}
        if warmed:  # later than that everything is compiled
            figures["triton_compilations"] = float(len(compiled))
        name = "after warmup_allocator" if warmed else "without warmup_allocator"
        recorder.add(DeviceRecord("allocator", f"{steps} steps to {longest} tokens", "ramp", name, figures=figures))


def _loss(logits: Tensor, _: Any = None) -> Tensor:
    return logits.float().logsumexp(-1).mean()
