"""The figures that this project is held to on a CPU, looked up in a run's records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from .alibi_attention.gpu import BOTH, FORWARD
from .alibi_attention.peers import EAGER, FLASH, FLEX, MASK
from .common.goals import Goal
from .common.records import Record
from .report_tables import goal_rows
from .resize_batch.implementations import BY_HAND, OURS

_SHORT: dict[str, Any] = {"length": 1024, "head_dim": 64, "batch_size": 2}
_LONG: dict[str, Any] = {"length": 8192, "head_dim": 64}
_SEGMENTS: dict[str, Any] = {"length": 16384, "segment_length": 16}

SMALL_MEGABYTES = 1.0  #: of a batch: what a call waits for counts
LARGE_MEGABYTES = 64.0


def _attention(records: list[Record]) -> Iterator[Goal]:
    for dtype, wanted in (
        (torch.float32, ((MASK, 3), (FLEX, 4), (EAGER, 12), (FLASH, 1.5))),
        (torch.bfloat16, ((MASK, 3), (FLEX, 2))),
    ):
        for peer, goal in wanted:
            facts = {**_SHORT, "work": FORWARD, "dtype": str(dtype)}
            name = str(dtype).removeprefix("torch.")
            yield Goal(f"{name} B2 S1024 D64 forward vs {peer.name}", goal, speedup(records, peer.name, **facts), "x")
    for peer, goal in ((MASK, 2.5), (EAGER, 6)):
        facts = {**_SHORT, "work": BOTH, "dtype": "torch.float32"}
        yield Goal(f"float32 B2 S1024 D64 {BOTH} vs {peer.name}", goal, speedup(records, peer.name, **facts), "x")
    yield Goal("float32 B1 S8192 D64 forward vs SDPA with bias mask", 10, _long(records, "a"), "x")
    yield Goal("the same, our inputs b", 10, _long(records, "b"), "x")
    facts = {**_SEGMENTS, "work": FORWARD}
    yield Goal("segments of 16 in 16k tokens, forward vs rows cut, SDPA", 2, speedup(records, MASK.name, **facts), "x")
    facts = {**_LONG, "work": FORWARD, "inputs": "a", "dtype": "torch.float32"}
    ours, masked = (_find(records, name, **facts) for name in ("alibi_attention", MASK.name))
    peaks = [record.facts["peak_megabytes"] for record in (ours, masked) if record and "peak_megabytes" in record.facts]
    ratio = peaks[1] / peaks[0] if len(peaks) == 2 else None
    yield Goal("S8192, peak extra memory, SDPA with bias mask to ours", 20, ratio, "x")


def _long(records: list[Record], inputs: str) -> float | None:
    return speedup(records, MASK.name, inputs, **_LONG, work=FORWARD, dtype="torch.float32")


def speedup(records: list[Record], peer: str, inputs: str = "a", **facts: Any) -> float | None:
    """Of ours with default options over a peer, whose time does not depend on its inputs, with all threads."""
    ours = _find(records, "alibi_attention", inputs=inputs, **facts)
    other = _find(records, peer, inputs="a", **facts)
    return None if ours is None or other is None else other.median_ms / ours.median_ms


def _find(records: list[Record], implementation: str, **facts: Any) -> Record | None:
    """`alibi_attention` stands for whichever of its backends is the default."""
    names = (implementation, f"{implementation} native", f"{implementation} triton")
    same = [
        record
        for record in records
        if record.implementation in names and all(record.facts.get(name) == fact for name, fact in facts.items())
    ]
    return max(same, key=lambda record: record.threads, default=None)


def _resizing(records: list[Record]) -> Iterator[Goal]:
    most_threads = max(record.threads for record in records)
    pairs = [
        (record, other)
        for record in records
        for other in records
        if record.threads == other.threads == most_threads
        and record.case == other.case
        and (record.implementation, other.implementation) == (OURS, BY_HAND)
    ]
    large = [
        (other.median_ms / record.median_ms, record.case)
        for record, other in pairs
        if record.facts["source_megabytes"] > LARGE_MEGABYTES
    ]
    ratio, where = min(large, default=(None, ""))
    yield Goal(f"over {LARGE_MEGABYTES:.0f} MB, vs {BY_HAND}, worst", 1.5, ratio, "x", where)
    small = [
        ((record.median_ms - other.median_ms) / max(0.1 * other.median_ms, 5e-3), record.case)
        for record, other in pairs
        if record.facts["source_megabytes"] < SMALL_MEGABYTES
    ]
    slowest, where = max(small, default=(None, ""))
    yield Goal(
        f"under {SMALL_MEGABYTES:.0f} MB, time beyond {BY_HAND} as a share of 5 µs or of 10 % if that is more, worst",
        1, slowest, "", where, at_most=True,
    )  # fmt: skip


def goals_table(records: list[Record]) -> str:
    goals = {"alibi_attention": _attention, "resize_batch": _resizing}[records[0].operator]
    return goal_rows(goals(records))
