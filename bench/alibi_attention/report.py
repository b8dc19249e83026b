"""Goals and tables of alibi_attention, from its records on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ..common.goals import Goal, worst
from ..common.records import CpuRecord, is_implementation, markdown
from ..gpu.records import DeviceRecord, DeviceRecords, speedup, teraflops
from .cases import BACKWARD, BOTH, FORWARD
from .peers import EAGER, FLASH, FLEX, FLEX_ROWS, MASK, OURS, OURS_NO_SKIP

RECORDS = "cpu_alibi_attention"  #: name of the records file of the CPU benchmark
#: Names with a file for each kind of CPU.
SHORT, SEGMENTS = "cpu_short_attention", "cpu_segments"
CALLS, DECODING = "cpu_attention_calls", "cpu_decoding"
STAGES = ("long", "lengths", "segments")  #: stages of a GPU run that are compared with peers

_SHORT: dict[str, Any] = {"length": 1024, "head_dim": 64, "batch_size": 2}
_LONG: dict[str, Any] = {"length": 8192, "head_dim": 64}
_SEGMENTS: dict[str, Any] = {"length": 16384, "segment_length": 16}


# ---- on a CPU


def cpu_goals(records: list[CpuRecord]) -> Iterator[Goal]:
    for dtype, peers in (
        (torch.float32, ((MASK, 3), (FLEX, 4), (EAGER, 12), (FLASH, 1.5))),
        (torch.bfloat16, ((MASK, 3), (FLEX, 2))),
    ):
        for peer, goal in peers:
            facts = {**_SHORT, "work": FORWARD, "dtype": str(dtype)}
            name = str(dtype).removeprefix("torch.")
            ratio = _cpu_speedup(records, peer.name, **facts)
            yield Goal(f"{name} B2 S1024 D64 forward vs {peer.name}", goal, ratio, "x")
    for peer, goal in ((MASK, 2.5), (EAGER, 6)):
        facts = {**_SHORT, "work": BOTH, "dtype": "torch.float32"}
        ratio = _cpu_speedup(records, peer.name, **facts)
        yield Goal(f"float32 B2 S1024 D64 {BOTH} vs {peer.name}", goal, ratio, "x")
    facts = {**_LONG, "work": FORWARD, "dtype": "torch.float32"}
    for inputs, what in (("a", "float32 B1 S8192 D64 forward vs SDPA with bias mask"), ("b", "the same, our inputs b")):
        yield Goal(what, 10, _cpu_speedup(records, MASK.name, inputs, **facts), "x")
    ratio = _cpu_speedup(records, MASK.name, **_SEGMENTS, work=FORWARD)
    yield Goal("segments of 16 in 16k tokens, forward vs rows cut, SDPA", 2, ratio, "x")
    ours, masked = (find(records, name, inputs="a", **facts) for name in (OURS, MASK.name))
    peaks = [record.facts["peak_megabytes"] for record in (ours, masked) if record and "peak_megabytes" in record.facts]
    ratio = peaks[1] / peaks[0] if len(peaks) == 2 else None
    yield Goal("S8192, peak extra memory, SDPA with bias mask to ours", 20, ratio, "x")


def _cpu_speedup(records: list[CpuRecord], peer: str, inputs: str = "a", **facts: Any) -> float | None:
    """Speedup of ours with default options over a peer, with all threads. A peer's time is the same for all inputs."""
    ours = find(records, OURS, inputs=inputs, **facts)
    other = find(records, peer, inputs="a", **facts)
    return None if ours is None or other is None else other.median_ms / ours.median_ms


def find(records: list[CpuRecord], implementation: str, **facts: Any) -> CpuRecord | None:
    """The record with the most threads."""
    same = [
        record
        for record in records
        if is_implementation(record.implementation, implementation)
        and all(record.facts.get(name) == fact for name, fact in facts.items())
    ]
    return max(same, key=lambda record: record.threads, default=None)


def by_dtype_and_work(name: str, rows: Mapping[Any, Any], cell: Callable[..., str]) -> str:
    """A table: what `cell` returns of each row, dtype and work. `name` is the header of the rows' labels."""
    columns = [(dtype, work) for dtype in ("float32", "bfloat16") for work in (FORWARD, BOTH)]
    cells = [[label, *(cell(row, *column) for column in columns)] for label, row in rows.items()]
    return markdown([name, *(f"{dtype}, {work}" for dtype, work in columns)], cells)


# ---- on a GPU


def device_goals(records: DeviceRecords) -> Iterator[Goal]:
    compared = records.of_stages(*STAGES)
    yield from _dense_goals(compared)
    yield from _skipping_goals(compared)
    yield from _length_goals(compared)
    yield from _segment_goals(compared, records)


def _dense_goals(records: DeviceRecords) -> Iterator[Goal]:
    for work, head_dim, goal in ((FORWARD, 128, 600), (FORWARD, 64, 470), (BACKWARD, 128, 400)):
        facts: dict[str, Any] = {"length": 8192, "head_dim": head_dim, "causal": True, "key_heads": 2048 // head_dim}
        found = records.find(OURS_NO_SKIP, work, **facts)
        yield Goal(f"causal 8k, no skip, {work}, D{head_dim}", goal, teraflops(found), "TFLOP/s")


def _skipping_goals(records: DeviceRecords) -> Iterator[Goal]:
    for inputs in "ab":
        for head_dim in (128, 64):
            facts: dict[str, Any] = {"length": 16384, "head_dim": head_dim, "batch_size": 1}
            forward, both = (records.find(OURS, work, inputs, **facts) for work in (FORWARD, BOTH))
            share = forward.figures.get("attended_share") if forward else None
            where = "" if share is None else f"visits {share:.1%} of keys"
            what = f"causal 16k D{head_dim}, inputs {inputs}"
            yield Goal(f"{what}, {FORWARD}", 1000, teraflops(forward), "TFLOP/s", where)
            ratio = speedup(both, records.beside(both, FLEX.name)) if both else None
            yield Goal(f"{what}, {BOTH} vs FlexAttention", 2, ratio, "x")


def _worst_speedup(records: DeviceRecords, found: Iterable[DeviceRecord], *others: str) -> tuple[float | None, str]:
    """The smallest speedup over the other implementations, with its case."""
    return worst((speedup(each, records.beside(each, other)), each.case) for each in found for other in others)


def _length_goals(records: DeviceRecords) -> Iterator[Goal]:
    for work in (FORWARD, BOTH):
        found = list(records.timed(OURS, work, causal=True, segment_length=None))
        up_to_16k = [record for record in found if record.facts["length"] <= 16384]
        from_4k = [record for record in found if record.facts["length"] >= 4096]
        ratio, where = _worst_speedup(records, up_to_16k, FLEX.name)
        yield Goal(f"lengths 128 to 16k, {work} vs FlexAttention, worst", 1.3, ratio, "x", where)
        ratio, where = _worst_speedup(records, from_4k, FLASH.name)
        yield Goal(f"from 4k on, {work} vs SDPA flash without bias, worst", 1.0, ratio, "x", where)


def _segment_goals(compared: DeviceRecords, records: DeviceRecords) -> Iterator[Goal]:
    forward, both = (_segment_records(compared, work) for work in (FORWARD, BOTH))
    share, where = worst((records.share_of_copy(record), record.case) for record in forward)
    what = "segments 8 to 256 in 64k tokens, forward, worst share of a copy"
    yield Goal(what, 70, share and 100 * share, "%", where)
    for work, found in ((FORWARD, forward), (BOTH, both)):
        ratio, where = _worst_speedup(compared, found, FLEX.name, FLEX_ROWS.name)
        yield Goal(f"the same, {work} vs the best FlexAttention, worst", 5, ratio, "x", where)


def _segment_records(records: DeviceRecords, work: str) -> list[DeviceRecord]:
    return [record for record in records.timed(OURS, work) if record.facts["segment_length"]]
