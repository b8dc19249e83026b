"""The time of every step of a ramp on the CPU: "segments" beside "flatten", which changes the shape of the batch.

A small GPT-2 with ALiBi, compiled. All batches have the same tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from seqwarm_kernels import SequenceLengthScheduler, apply_alibi, warmup_allocator
from seqwarm_kernels.utils.figures import new_figure

from .common.figures import label_lines, log_axis, plot
from .common.records import markdown, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDS = "cpu_ramp"
SEGMENTS, FLATTEN = "segments", "flatten"
STATIC, WARMED = "flatten, dynamic=False", "flatten, after warmup_allocator"
VARIANTS = (SEGMENTS, FLATTEN, STATIC, WARMED)
ROWS, SHORTEST, LONGEST, STEP_SIZE, STEPS_EACH = 8, 16, 128, 16, 6
TINY = {"n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 100}
SMALL = {"n_embd": 256, "n_head": 4, "n_layer": 2, "vocab_size": 4096}


class Training:
    """Steps of one variant, compiled anew."""

    def __init__(self, variant: str, sizes: dict[str, Any], backend: str) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        torch._dynamo.reset()
        torch.manual_seed(0)
        dropout: dict[str, Any] = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        self.model = GPT2LMHeadModel(GPT2Config(n_positions=LONGEST, use_cache=False, **sizes, **dropout))
        self.model.loss_type = "ForCausalLM"
        apply_alibi(self.model, LONGEST)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        duration = (LONGEST - SHORTEST) // STEP_SIZE * STEPS_EACH
        self.scheduler = SequenceLengthScheduler(SHORTEST, LONGEST, duration=duration, step_size=STEP_SIZE)
        self.steps = duration + STEPS_EACH
        self.options: dict[str, Any] = {"mode": "flatten"}
        if variant == SEGMENTS:
            self.options = {"mode": "segments", "boundaries": "cu_seq_lens"}
        ids = torch.randint(sizes["vocab_size"], (ROWS, LONGEST))
        self.source = {"input_ids": ids, "labels": ids}
        self.model.compile(backend=backend, dynamic=False if variant == STATIC else None)
        if variant == WARMED:
            warmup_allocator(
                self.model, LONGEST, example_batch=self.source, optimizer=self.optimizer, scheduler=self.scheduler,
                resize_options=self.options,
            )  # fmt: skip

    def step(self) -> None:
        self.model(**self.scheduler.resize(self.source, **self.options)).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(sizes: dict[str, int], backend: str) -> Iterator[dict[str, Any]]:
    # By default the ninth graph of a function is the last: later lengths would run without a compiler.
    with torch._dynamo.config.patch(recompile_limit=64):
        for variant in tqdm(VARIANTS, desc="ramps", unit="ramp"):
            training = Training(variant, sizes, backend)
            for index in range(training.steps):
                start, length = time.perf_counter(), training.scheduler.seq_length
                training.step()
                training.scheduler.step()
                seconds = time.perf_counter() - start
                yield {"variant": variant, "step": index, "seq_length": length, "seconds": seconds}


def ramp_figure(lines: list[dict[str, Any]]) -> Figure:
    figure = new_figure(9, 3.8)
    axes = figure.subplots()
    for variant in VARIANTS:
        steps = [line for line in lines if line["variant"] == variant]
        seconds = [line["seconds"] for line in steps]
        plot(axes, variant, [line["step"] + 1 for line in steps], seconds, markevery=STEPS_EACH, alpha=0.9)
    log_axis(axes.yaxis)
    axes.set(xlabel=f"step ({STEPS_EACH} at each length, from {SHORTEST} to {LONGEST} tokens)", ylabel="seconds")
    label_lines([axes], bold=SEGMENTS)
    figure.suptitle("Time of each step of a ramp: a small GPT-2 with ALiBi, torch.compile, on a CPU")
    return figure


def ramp_table(lines: list[dict[str, Any]]) -> str:
    """The fastest step at each length, and the time of the whole ramp."""
    lengths = dict.fromkeys(line["seq_length"] for line in lines)
    rows = []
    for variant in VARIANTS:
        steps = [line for line in lines if line["variant"] == variant]
        fastest = [min(line["seconds"] for line in steps if line["seq_length"] == length) for length in lengths]
        whole = sum(line["seconds"] for line in steps)
        rows.append([variant, *(f"{1e3 * seconds:.3g}" for seconds in fastest), f"{whole:.3g}"])
    return markdown(["fastest step, ms", *map(str, lengths), "whole ramp, s"], rows)


def main(arguments: argparse.Namespace) -> None:
    save(RECORDS, run(SMALL, "inductor"), ramp_table)
