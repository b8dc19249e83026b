"""Records by what they say of their case, and figures derived from one or two of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..alibi_attention.peers import NO_SKIP
from .records import DeviceRecord

OURS = "ours"
OURS_NO_SKIP = "ours, no skip"
STAGES = ("long", "lengths", "segments")  # of attention


def is_ours(record: DeviceRecord, *, skip: bool) -> bool:
    return record.implementation.startswith("alibi_attention") and record.implementation.endswith(NO_SKIP) != skip


def matches(record: DeviceRecord, implementation: str) -> bool:
    if implementation in (OURS, OURS_NO_SKIP):
        return is_ours(record, skip=implementation == OURS)
    return record.implementation == implementation


class Records:
    """Everything that one run recorded."""

    def __init__(self, records: Iterable[DeviceRecord]) -> None:
        self.all = list(records)

    def find(self, implementation: str, work: str, inputs: str = "a", **facts: Any) -> DeviceRecord | None:
        """The first with a time; `facts` that are not named may be anything."""
        return next(iter(self.each(implementation, work, inputs, **facts)), None)

    def each(self, implementation: str, work: str, inputs: str = "a", **facts: Any) -> Iterator[DeviceRecord]:
        for record in self.all:
            timed = record.stage in STAGES and record.median_ms is not None
            same = (record.work, record.inputs) == (work, inputs) and matches(record, implementation)
            if timed and same and all(record.facts.get(name) == value for name, value in facts.items()):
                yield record

    def beside(self, record: DeviceRecord, implementation: str) -> DeviceRecord | None:
        """What another took for the same."""
        key = record.stage, record.case, record.work, record.inputs
        for other in self.all:
            same = (other.stage, other.case, other.work, other.inputs) == key
            if same and other.median_ms is not None and matches(other, implementation):
                return other
        return None

    def of_stage(self, stage: str) -> list[DeviceRecord]:
        return [record for record in self.all if record.stage == stage]

    def copy_rate(self) -> float | None:
        """Bytes read and written in a second by a plain copy, in GB."""
        rates = [rate for record in self.of_stage("copy") if (rate := gigabytes_per_second(record)) is not None]
        return max(rates, default=None)


def teraflops(record: DeviceRecord | None) -> float | None:
    if record is None or record.median_ms is None or "gflop" not in record.figures:
        return None
    return record.figures["gflop"] / record.median_ms


def gigabytes_per_second(record: DeviceRecord | None) -> float | None:
    if record is None or record.median_ms is None or "moved_megabytes" not in record.figures:
        return None
    return record.figures["moved_megabytes"] / record.median_ms


def speedup(record: DeviceRecord | None, other: DeviceRecord | None) -> float | None:
    """How many times as long the other took."""
    if record is None or other is None or record.median_ms is None or other.median_ms is None:
        return None
    return other.median_ms / record.median_ms
