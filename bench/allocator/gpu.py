"""A whole ramp of two models: device allocations, compilations and stalls, eager, compiled and captured.

Each ramp runs in a process of its own, because memory and compiled kernels stay in a process.
`python -m bench.allocator.gpu MODEL VARIANT` prints the figures of one ramp as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from seqwarm_kernels import (
    BatchBuffers,
    SequenceLengthScheduler,
    alibi_attention_varlen,
    apply_alibi,
    compilations,
    resize_batch,
    warmup_allocator,
)
from seqwarm_kernels.demo.model import GPT, Attention

from ..common.goals import Goal
from ..common.timing import device_allocations
from ..gpu.records import DeviceRecord, DeviceRecords, Recorder, explain

AFTER = "after warmup_allocator"
COMPILED = "torch.compile, after warmup_allocator"
CAPTURED = "a captured graph for each length, after warmup_allocator"
SEGMENTS = "segments, one captured graph"
WITHOUT = "without warmup_allocator"
FULL_LENGTH = "full length throughout"
GPT2, LLAMA = "GPT-2 small", "Llama of 290M"
#: The first say most, if the time does not suffice for all.
RAMPS = (
    *((GPT2, variant) for variant in (AFTER, FULL_LENGTH, SEGMENTS, CAPTURED, COMPILED, WITHOUT)),
    *((LLAMA, variant) for variant in (AFTER, FULL_LENGTH, COMPILED)),
)
STEPS_AT_FULL_LENGTH = 16


def ramp(recorder: Recorder, device: torch.device, tiny: bool) -> None:
    for model, variant in RAMPS:
        command = [sys.executable, "-m", "bench.allocator.gpu", model, variant, *(["--tiny"] if tiny else [])]
        key = "allocator", model, "ramp", variant
        if recorder.out_of_time() or recorder.has(*key, "a"):
            continue
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=recorder.seconds_left(), check=True)
        except subprocess.CalledProcessError as error:
            recorder.add(DeviceRecord(*key, failure=error.stderr.strip().splitlines()[-1]))
        except subprocess.TimeoutExpired as error:
            recorder.add(DeviceRecord(*key, failure=explain(error)))
        else:
            recorder.add(DeviceRecord(*key, figures=json.loads(run.stdout.splitlines()[-1])))


class Llama(nn.Module):
    """transformers' Llama with ALiBi in place of rotary embeddings: input_ids (B, S) -> logits (B, S, vocabulary)."""

    def __init__(self, longest: int, tiny: bool) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        width, inner, layers, heads, vocabulary = (32, 64, 2, 4, 100) if tiny else (1024, 2816, 20, 16, 32_000)
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads // 4,
            vocab_size=vocabulary,
        )
        self.model = LlamaForCausalLM(config)
        apply_alibi(self.model, longest)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False).logits


class SegmentedAttention(Attention):
    """Attends inside the segments of one row, whose boundaries are set before each step."""

    ends: Tensor

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.query_key_value(hidden[0]).unflatten(-1, (3, self.heads, -1)).unbind(1)  # (T, H, D)
        tokens = len(query)
        attended = alibi_attention_varlen(query, key, value, self.ends, self.ends, tokens, tokens, self.slopes)
        return self.project(attended.flatten(1))[None]


def build(name: str, longest: int, tiny: bool) -> Any:
    """GPT-2 small with ALiBi in place of its position embeddings, or a Llama."""
    if name == LLAMA:
        return Llama(longest, tiny)
    model = GPT(2, 2, 32) if tiny else GPT(12, 12, 768)
    model.embedding = nn.Embedding(100 if tiny else 50257, 32 if tiny else 768)
    return model


def loss_of(logits: Tensor, batch: Any) -> Tensor:
    labels = batch["labels"] if "labels" in batch else batch["input_ids"]
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class Ramp:
    """A training whose sequences grow to `longest` tokens, two steps at each length."""

    def __init__(self, model: str, variant: str, tiny: bool) -> None:
        self.variant = variant
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.longest, batch_size, step_size = (32, 2, 8) if tiny else (1024, 16, 16)
        self.model = build(model, self.longest, tiny)
        self.segmented: list[SegmentedAttention] = []
        if variant == SEGMENTS:
            for block in self.model.blocks:
                block.attention = SegmentedAttention(block.attention.heads, self.model.norm.normalized_shape[0])
                self.segmented.append(block.attention)
        self.model.to(self.device)
        if variant == COMPILED:
            self.model.compile(backend="aot_eager" if tiny else "inductor")
        capturable = variant in (CAPTURED, SEGMENTS) and self.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True, capturable=capturable)
        self.ramp_steps = 2 * self.longest // step_size
        duration = 0 if variant == FULL_LENGTH else self.ramp_steps
        self.scheduler = SequenceLengthScheduler(8, self.longest, duration=duration, step_size=step_size)
        self.source = {"input_ids": torch.randint(100, (batch_size, self.longest), device=self.device)}
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else None

    def train(self, batch: Any) -> None:
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            for attention in self.segmented:
                attention.ends = batch["cu_seq_lens_q"]
            logits = self.model(batch["input_ids"])  # kept in a variable, as warmup_allocator rehearses it
            loss = loss_of(logits, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def warm_up(self) -> dict[str, float]:
        report = warmup_allocator(
            self.model, self.longest, example_batch=self.source, loss_fn=loss_of, optimizer=self.optimizer,
            autocast_dtype=self.dtype, max_grad_norm=1.0, scheduler=self.scheduler,
        )  # fmt: skip
        return {"warmup_seconds": report.seconds, "warmup_compilations": float(len(report.compiled))}

    def step_of(self) -> Callable[[], None]:
        """One step at the current length."""
        if self.variant == SEGMENTS:
            return self._segments_step()
        if self.variant != CAPTURED:
            return lambda: self.train(self.scheduler.resize(self.source))
        buffers = BatchBuffers(self.source, self.longest)
        # The longest first: captured from the shortest on, the graphs of GPT-2 small did not fit on an H200.
        lengths = sorted({milestone.seq_length for milestone in self.scheduler.milestones()}, reverse=True)
        steps = {length: self._captured(resize_batch(self.source, length, out=buffers)) for length in lengths}

        def step() -> None:
            resize_batch(self.source, self.scheduler.seq_length, out=buffers)
            steps[self.scheduler.seq_length]()

        return step

    def _segments(self) -> dict[str, Tensor]:
        """All rows as one, with segments of the current length: the same shapes at each length."""
        source = {**self.source, "labels": self.source["input_ids"]}
        batch = self.scheduler.resize(source, mode="segments", boundaries="cu_seq_lens")
        tokens = {name: batch[name].view(1, -1) for name in source}
        return {**tokens, "cu_seq_lens_q": batch["cu_seq_lens_q"]}

    def _segments_step(self) -> Callable[[], None]:
        batch = {name: tensor.clone() for name, tensor in self._segments().items()}
        captured = self._captured(batch)

        def step() -> None:
            for name, tensor in self._segments().items():
                batch[name].copy_(tensor)
            captured()

        return step

    def _captured(self, batch: Any) -> Callable[[], None]:
        """A step on these tensors in a graph. All graphs share memory, since they never run together."""
        if self.device.type != "cuda":
            return lambda: self.train(batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.train(batch)  # libraries choose their kernels outside of a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self.train(batch)
        return graph.replay

    @functools.cached_property
    def _pool(self) -> Any:
        return torch.cuda.graph_pool_handle()


def figures_of(model: str, variant: str, tiny: bool) -> dict[str, float]:
    ramp = Ramp(model, variant, tiny)
    figures = ramp.warm_up() if variant in (AFTER, COMPILED, CAPTURED) else {}
    start = time.perf_counter()
    step = ramp.step_of()
    if variant in (CAPTURED, SEGMENTS):
        figures["capture_seconds"] = time.perf_counter() - start
    before, seconds = device_allocations(), []
    with compilations() as compiled:
        for _ in range(ramp.ramp_steps + STEPS_AT_FULL_LENGTH):
            start = time.perf_counter()
            step()
            ramp.scheduler.step()
            if ramp.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    figures |= {
        "device_allocations": float(device_allocations() - before),
        "compilations": float(len(compiled)),
        "stalls": float(stalls(seconds)),
        "seconds": sum(seconds),
    }
    if ramp.device.type == "cuda":
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
    for model in (GPT2, LLAMA):
        ramps = {r.implementation: r.figures for r in records.of_stages("allocator").all if r.case == model}
        without = ramps.get(WITHOUT, {})
        for name in (AFTER, COMPILED, CAPTURED, SEGMENTS) if model == GPT2 else (AFTER, COMPILED):
            found = ramps.get(name, {})
            for what in ("device_allocations", "compilations", "stalls"):
                beside = f"{without[what]:.0f} without" if what in without and name == AFTER else ""
                text = f"{model}, ramp to 1024, {name.partition(',')[0]}, {what.replace('_', ' ')}"
                yield Goal(text, 0, found.get(what), "", beside, at_most=True)
        warmed, full = ramps.get(AFTER, {}), ramps.get(FULL_LENGTH, {})
        reserved, constant = warmed.get("reserved_megabytes"), full.get("reserved_megabytes")
        surplus = None if reserved is None or not constant else 100 * (reserved / constant - 1)
        yield Goal(f"{model}, ramp, reserved beyond the full length throughout", 5, surplus, "%", at_most=True)
        seconds = warmed.get("warmup_seconds")
        yield Goal(f"{model}, warmup_allocator, compilation included", 5, seconds, "s", at_most=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=(GPT2, LLAMA))
    parser.add_argument("variant", choices=[variant for _, variant in RAMPS])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print(json.dumps(figures_of(arguments.model, arguments.variant, arguments.tiny)))


if __name__ == "__main__":
    main()
