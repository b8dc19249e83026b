"""What an H200 should measure, written down before anything ran on one. The last table of a run says what held.

A prediction that fails is a finding: either the arithmetic forgot something, or the program does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from experiments.gpu import EAGER_WARMUP, SMALL_BATCH, WARMUP, sooner

from ..alibi_attention import hopper
from ..alibi_attention.cases import BACKWARD, BOTH, FORWARD
from ..alibi_attention.peers import CUDNN, FLASH_3, FLASH_4, FLEX_FLASH, FLEX_TUNED, OURS_NO_SKIP
from ..alibi_attention.peers import OURS as OURS_ATTENTION
from ..allocator.gpu import AFTER, CAPTURED, COMPILED, FULL_LENGTH, GPT2, LLAMA
from ..common.records import markdown
from ..moment_statistics.gpu import MONITORED
from ..moment_statistics.gpu import STEP as TRAINING_STEP
from ..resize_batch.implementations import OURS, with_backend
from .records import STEPS, TESTS, DeviceRecords, gigabytes_per_second, speedup, teraflops

Measured = Callable[[DeviceRecords], float | None]


class Prediction(NamedTuple):
    what: str
    arithmetic: str
    low: float
    high: float
    unit: str
    measured: Measured

    def outcome(self, records: DeviceRecords) -> str:
        value = self.measured(records)
        if value is None:
            return "not yet measured"
        return "held" if self.low <= value <= self.high else "too low" if value < self.low else "too high"

    def value_text(self, records: DeviceRecords) -> str:
        value = self.measured(records)
        return "" if value is None else f"{value:.4g} {self.unit}".strip()

    def range_text(self) -> str:
        return f"{self.low:g} to {self.high:g} {self.unit}".strip()


def _teraflops(work: str, head_dim: int) -> Measured:
    """Causal attention of 16k tokens, without skipping and without a mask."""

    def measured(records: DeviceRecords) -> float | None:
        found = records.of_stages("paths")
        return teraflops(found.find(OURS_NO_SKIP, work, length=16384, head_dim=head_dim, masked=False))

    return measured


def _mask_costs(records: DeviceRecords) -> float | None:
    found = records.of_stages("paths")
    plain, masked = (
        found.find(OURS_NO_SKIP, FORWARD, length=16384, head_dim=128, masked=masked) for masked in (False, True)
    )
    return speedup(plain, masked)


def _traffic_of_short_rows(records: DeviceRecords) -> float | None:
    record = records.of_stages("lengths").find(OURS_ATTENTION, FORWARD, length=8, head_dim=64)
    rate = None if record is None else gigabytes_per_second(record)
    return None if rate is None else rate / 1000


def _traffic_of_decoding(records: DeviceRecords) -> float | None:
    found = records.of_stages("decoding")
    record = found.find(OURS_NO_SKIP, FORWARD, length=16384, head_dim=128, batch_size=8)
    rate = None if record is None else gigabytes_per_second(record)
    return None if rate is None else rate / 1000


def _share_of_copy(records: DeviceRecords) -> float | None:
    """Of the largest batch, truncated."""
    for record in records.of_stages("resize_batch").all:
        large = record.facts.get("rows") == 8192 and record.facts["method"] == "truncate"
        if large and record.implementation == with_backend(OURS, "triton"):
            return records.share_of_copy(record)
    return None


def _of_ramp(figure: str, implementation: str = AFTER, model: str = GPT2) -> Measured:
    def measured(records: DeviceRecords) -> float | None:
        ramps = {(record.case, record.implementation): record.figures for record in records.of_stages("allocator").all}
        return ramps.get((model, implementation), {}).get(figure)

    return measured


def _excess_of_ramp(records: DeviceRecords) -> float | None:
    ramp, full = (_of_ramp("reserved_megabytes", name)(records) for name in (AFTER, FULL_LENGTH))
    return None if ramp is None or not full else 100 * (ramp / full - 1)


def _cost_of_monitor(records: DeviceRecords) -> float | None:
    step, monitored = (records.of_stages("diagnostics").find(name, "training") for name in (TRAINING_STEP, MONITORED))
    ratio = speedup(step, monitored)
    return None if ratio is None else 100 * (ratio - 1)


def _peer(name: str, head_dim: int = 128) -> Measured:
    """A peer's causal forward of 8k tokens."""

    def measured(records: DeviceRecords) -> float | None:
        found = records.of_stages("long", "lengths")
        return teraflops(found.find(name, FORWARD, length=8192, head_dim=head_dim, causal=True))

    return measured


def _beside_tuned(records: DeviceRecords) -> float | None:
    found = records.of_stages("tuned")
    ours = found.find(OURS_ATTENTION, BOTH, length=16384, head_dim=128)
    return None if ours is None else speedup(ours, found.beside(ours, FLEX_TUNED.name))


def _of_hopper(work: str, beside: str | None = None, name: str = hopper.GLUON, **facts: Any) -> Measured:
    """TFLOP/s of the Gluon kernels or a peer's, or how many times as fast they are as others."""

    def measured(records: DeviceRecords) -> float | None:
        found = records.of_stages(hopper.STAGE)
        record = found.find(name, work, **facts)
        if record is None or beside is None:
            return teraflops(record)
        return speedup(record, found.find(beside, work, **facts))

    return measured


def _captured_speed(records: DeviceRecords) -> float | None:
    eager, captured = (_of_ramp("seconds", name)(records) for name in (AFTER, CAPTURED))
    return None if eager is None or not captured else eager / captured


def _sooner(arm: str, unit: str) -> Measured:
    return lambda records: sooner(records, arm, unit)


def _failed(records: DeviceRecords) -> float | None:
    found = records.of_stages(STEPS, TESTS).all
    ended = [record for record in found if not (record.failure or "").startswith(("skipped", "not run", "running"))]
    return float(sum(record.failure is not None for record in ended)) if found else None


_COUNTED = "clocks of products, exponentials and other arithmetic of a tile"
_LOCKSTEP = "the same, but three barriers a tile and a wait for both products before the softmax: hardly any overlap"
_CONSUMERS = "as in an earlier run, and fewer registers spilled since"

PREDICTIONS = (
    Prediction("forward D128, counted", _COUNTED, 480, 620, "TFLOP/s", _teraflops(FORWARD, 128)),
    Prediction("forward D128, in lock-step", _LOCKSTEP, 400, 480, "TFLOP/s", _teraflops(FORWARD, 128)),
    Prediction("forward D64, counted", _COUNTED, 350, 470, "TFLOP/s", _teraflops(FORWARD, 64)),
    Prediction("forward D64, in lock-step", _LOCKSTEP, 280, 380, "TFLOP/s", _teraflops(FORWARD, 64)),
    Prediction("backward D128, counted", _COUNTED, 280, 400, "TFLOP/s", _teraflops(BACKWARD, 128)),
    Prediction("backward D128, in lock-step", _LOCKSTEP, 260, 330, "TFLOP/s", _teraflops(BACKWARD, 128)),
    Prediction(
        "two consumers, forward D128, full, 8k", _CONSUMERS, 570, 630, "TFLOP/s",
        _of_hopper(FORWARD, length=8192, head_dim=128, causal=False, skipping=False),
    ),
    Prediction(
        "two consumers, backward D128, 16k", _CONSUMERS, 485, 540, "TFLOP/s",
        _of_hopper(BACKWARD, length=16384, head_dim=128, causal=True, skipping=False),
    ),
    Prediction(
        "two consumers, backward D64, 16k", _CONSUMERS, 370, 410, "TFLOP/s",
        _of_hopper(BACKWARD, length=16384, head_dim=64, causal=True, skipping=False),
    ),
    Prediction(
        "two consumers beside Triton, forward D128, 16k, skipping",
        "1.13 in an earlier run; 6 % more pairs in tiles of 128 x 128 than in 64 x 64",
        1.08, 1.25, "x",
        _of_hopper(FORWARD, hopper.TRITON, length=16384, head_dim=128, causal=True, skipping=True),
    ),
    Prediction(
        "two consumers beside cuDNN without bias, forward D128, 16k",
        "1.0 in an earlier run: the bias costs one multiply-add",
        0.95, 1.05, "x",
        _of_hopper(FORWARD, CUDNN.name, length=16384, head_dim=128, causal=True, skipping=False),
    ),
    Prediction(
        "time of forward D128 with a mask, relative",
        "half the columns in a tile and pointers for bulk copies: twice the barriers, the same products",
        1.2, 2.0, "x", _mask_costs,
    ),
    Prediction(
        "traffic of forward, 2,048 rows of 8 tokens, D64",
        "a tile of 128 tokens moves 64 KiB, 1.8 us of a multiprocessor's share, and computes its two products in 0.3",
        1.0, 3.5, "TB/s", _traffic_of_short_rows,
    ),
    Prediction(
        "traffic of decoding, 8 rows of 16,384 keys, 8 key heads of 128",
        "4,096 programs read 128 KiB each, two on a multiprocessor, keys in flight; values wait; 4.8 TB/s at most",
        2.0, 4.0, "TB/s", _traffic_of_decoding,
    ),
    Prediction(
        "resize_batch, 805 MB, share of a copy",
        "16 bytes a thread, each byte read and written once; half of each row is skipped",
        0.7, 1.0, "", _share_of_copy,
    ),
    Prediction(
        "device allocations of a ramp after warmup_allocator",
        "replay of the caching allocator's policy: 0 new segments",
        0, 0, "", _of_ramp("device_allocations"),
    ),
    Prediction("compilations of that ramp", "no length is part of a kernel", 0, 0, "", _of_ramp("compilations")),
    Prediction(
        "device allocations of a Llama's ramp",
        "GQA and a larger vocabulary change sizes only",
        0, 0, "", _of_ramp("device_allocations", AFTER, LLAMA),
    ),
    Prediction(
        "compilations of a ramp with torch.compile",
        "the length is dynamic from the second one on, and warmup_allocator has run two",
        0, 0, "", _of_ramp("compilations", COMPILED),
    ),
    Prediction(
        "device allocations of a ramp of captured graphs",
        "graphs share a pool that is full once they are captured",
        0, 0, "", _of_ramp("device_allocations", CAPTURED),
    ),
    Prediction(
        "speed of that ramp, relative to eager",
        "an eager step takes the host 20 to 30 ms; a graph waits for the device alone, 2 to 45 ms by length",
        1.1, 1.7, "x", _captured_speed,
    ),
    Prediction(
        "memory reserved beyond full length throughout",
        "replay of GPT-2 small, 16 x 1024: 0.1 %",
        0, 5, "%", _excess_of_ramp,
    ),
    Prediction(
        "cost of TrainingMonitor, 50 million parameters",
        "it reads 0.4 GB of moments once, 0.1 ms at 4 TB/s, beside a step of some 20 ms",
        0, 2, "%", _cost_of_monitor,
    ),
    Prediction("steps and tests that fail", "all pass in the interpreter and compile", 0, 0, "", _failed),
    Prediction(
        "GPT-2 52m, eager, warmup, sooner in tokens",
        "the toy on a CPU: 1.56 to 1.66 with the same share of warmup",
        1.2, 1.8, "x", _sooner(EAGER_WARMUP, "tokens"),
    ),
    Prediction(
        "GPT-2 52m, eager, warmup, sooner in seconds",
        "tokens in short rows cost less attention, but steps of fewer tokens fill the GPU less",
        0.9, 1.6, "x", _sooner(EAGER_WARMUP, "seconds"),
    ),
    Prediction(
        "GPT-2 52m, compiled, warmup, sooner in seconds",
        "2.2 times sooner in tokens; an eager step of 2,048 tokens waits 22 ms for the host",
        0.8, 1.5, "x", _sooner(WARMUP, "seconds"),
    ),
    Prediction(
        "GPT-2 52m, compiled, batches of 10 rows, sooner in tokens",
        "as many steps as with warmup, which makes 3.3 times as many as the baseline",
        1.6, 2.3, "x", _sooner(SMALL_BATCH, "tokens"),
    ),
    Prediction(
        "SDPA cuDNN without bias, forward D128, 8k",
        "its own reports on Hopper",
        550, 680, "TFLOP/s", _peer(CUDNN.name),
    ),
    Prediction(
        "flash-attn-3 without bias, forward D128, full, 8k",
        "its authors report 639 on an H100",
        560, 680, "TFLOP/s",
        _of_hopper(FORWARD, name=FLASH_3.name, length=8192, head_dim=128, causal=False),
    ),
    Prediction(
        "flash-attn-3 without bias, backward D128, full, 8k",
        "its authors report 561 on an H100",
        490, 600, "TFLOP/s",
        _of_hopper(BACKWARD, name=FLASH_3.name, length=8192, head_dim=128, causal=False),
    ),
    Prediction(
        "flash-attn-4 without bias, forward D128, 8k",
        "FlashAttention-3's design in CuTe: 628 to 639 on an H100",
        560, 680, "TFLOP/s", _peer(FLASH_4.name),
    ),
    Prediction(
        "FlexAttention on flash-attn-4, forward D128, 8k",
        "the same with a bias computed for each score",
        400, 600, "TFLOP/s", _peer(FLEX_FLASH.name),
    ),
    Prediction(
        "skipping beside FlexAttention, max-autotune, 16k D128, both",
        "4.2 times the default's speed; tuning gains at most a third",
        3.0, 4.5, "x", _beside_tuned,
    ),
)  # fmt: skip


def predictions_table(records: DeviceRecords) -> str:
    rows = (
        [each.what, each.range_text(), each.value_text(records), each.outcome(records), each.arithmetic]
        for each in PREDICTIONS
    )
    return markdown(["prediction", "range", "measured", "outcome", "arithmetic"], rows)


def prediction_lines(records: DeviceRecords) -> Iterator[str]:
    for each in PREDICTIONS:
        yield f"{each.outcome(records):<17} {each.what:<52} {each.value_text(records):>16}  {each.range_text()}"
