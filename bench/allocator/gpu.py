"""A whole ramp of a model of GPT-2 small's size: device allocations, compilations and stalls.

Each variant runs in a process of its own, because memory and compiled kernels stay in a process.
`python -m bench.allocator.gpu VARIANT` prints the figures of one variant as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seqwarm_kernels import SequenceLengthScheduler, compilations, warmup_allocator
from seqwarm_kernels.demo.model import GPT

from ..common.goals import Goal
from ..common.timing import device_allocations
from ..gpu.records import DeviceRecord, DeviceRecords, Recorder, explain

AFTER = "after warmup_allocator"
WITHOUT = "without warmup_allocator"
FULL_LENGTH = "full length throughout"
VARIANTS = {"after": AFTER, "without": WITHOUT, "full": FULL_LENGTH}
STEPS_AT_FULL_LENGTH = 16


def ramp(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    for variant, name in VARIANTS.items():
        command = [sys.executable, "-m", "bench.allocator.gpu", variant, *(["--tiny"] if tiny else [])]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=recorder.seconds_left(), check=True)
        except subprocess.CalledProcessError as error:
            failure = error.stderr.strip().splitlines()[-1]
            recorder.add(DeviceRecord("allocator", "ramp", "ramp", name, failure=failure))
        except subprocess.TimeoutExpired as error:
            recorder.add(DeviceRecord("allocator", "ramp", "ramp", name, failure=explain(error)))
        else:
            figures = json.loads(run.stdout.splitlines()[-1])
            longest = int(figures.pop("longest"))
            recorder.add(DeviceRecord("allocator", f"8 to {longest} tokens", "ramp", name, figures=figures))


def build(tiny: bool) -> nn.Module:
    """GPT-2 small with ALiBi in place of its position embeddings."""
    model = GPT(2, 2, 32) if tiny else GPT(12, 12, 768)
    model.embedding = nn.Embedding(100 if tiny else 50257, 32 if tiny else 768)
    return model


def loss_of(logits: Tensor, batch: Any) -> Tensor:
    tokens = batch["input_ids"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def figures_of(variant: str, tiny: bool) -> dict[str, float]:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    longest, batch_size = (32, 2) if tiny else (1024, 16)
    model = build(tiny).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    duration = 0 if variant == "full" else longest // 4  # two steps at each sequence length
    scheduler = SequenceLengthScheduler(8, longest, duration=duration, step_size=8)
    source = torch.randint(100, (batch_size, longest), device=device)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    figures = {"longest": float(longest)}
    if variant == "after":
        report = warmup_allocator(
            model, longest, example_batch={"input_ids": source}, loss_fn=loss_of, optimizer=optimizer,
            autocast_dtype=dtype, max_grad_norm=1.0, scheduler=scheduler,
        )  # fmt: skip
        figures |= {"warmup_seconds": report.seconds, "warmup_compilations": float(len(report.compiled))}
    before, seconds = device_allocations(), []
    with compilations() as compiled:
        for _ in range(longest // 4 + STEPS_AT_FULL_LENGTH):
            start = time.perf_counter()
            batch = scheduler.resize({"input_ids": source})
            with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
                logits = model(batch["input_ids"])  # kept in a variable, as warmup_allocator rehearses it
                loss = loss_of(logits, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    figures |= {
        "device_allocations": float(device_allocations() - before),
        "compilations": float(len(compiled)),
        "stalls": float(stalls(seconds)),
        "seconds": sum(seconds),
    }
    if device.type == "cuda":
        figures["reserved_megabytes"] = torch.cuda.memory_reserved() / 1e6
    return figures


def stalls(seconds: list[float]) -> int:
    """Number of steps that take over three times the median of their ten neighbors."""
    count = 0
    for index, duration in enumerate(seconds):
        neighbors = seconds[max(0, index - 5) : index] + seconds[index + 1 : index + 6]
        count += duration > 3 * statistics.median(neighbors)
    return count


def device_goals(records: DeviceRecords) -> Iterator[Goal]:
    ramps = {record.implementation: record.figures for record in records.of_stages("allocator").all}
    warmed, without, full = (ramps.get(name, {}) for name in (AFTER, WITHOUT, FULL_LENGTH))
    for what in ("device_allocations", "compilations", "stalls"):
        beside = f"{without[what]:.0f} without" if what in without else ""
        yield Goal(f"ramp to 1024, {what.replace('_', ' ')}", 0, warmed.get(what), "", beside, at_most=True)
    reserved, constant = warmed.get("reserved_megabytes"), full.get("reserved_megabytes")
    surplus = None if reserved is None or not constant else 100 * (reserved / constant - 1)
    yield Goal("ramp, reserved beyond the full length throughout", 5, surplus, "%", at_most=True)
    yield Goal("warmup_allocator, seconds, compilation included", 5, warmed.get("warmup_seconds"), "s", at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps(figures_of(arguments.variant, arguments.tiny)))


if __name__ == "__main__":
    main()
