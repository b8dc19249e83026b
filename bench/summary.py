"""The short table at the end of a run on a GPU: a line for each case, ours first, the peers relative to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .device_records import DeviceRecord

#: What a record may say beside its time, and how much of it is worth a place in the table.
_FIGURES = {"error": "error {:.1e}", "attended_share": "visits {:.0%}", "device_allocations": "{:.0f} allocations"}


def teraflops(record: DeviceRecord) -> float | None:
    if record.median_ms is None or "gflop" not in record.figures:
        return None
    return record.figures["gflop"] / record.median_ms


def gigabytes_per_second(record: DeviceRecord) -> float | None:
    if record.median_ms is None or "megabytes" not in record.figures:
        return None
    return record.figures["megabytes"] / record.median_ms


def rate(record: DeviceRecord) -> str:
    if record.problem is not None:
        return record.problem[:40]
    flops, bandwidth = teraflops(record), gigabytes_per_second(record)
    parts = [
        "" if record.median_ms is None else f"{record.median_ms:.4g} ms",
        "" if flops is None or bandwidth is not None else f"{flops:.0f} TFLOP/s",
        "" if bandwidth is None else f"{bandwidth:.0f} GB/s",
        *(text.format(record.figures[name]) for name, text in _FIGURES.items() if name in record.figures),
    ]
    return " ".join(part for part in parts if part)


def _beside(record: DeviceRecord, first: DeviceRecord) -> str:
    """The other's time as a multiple of the first one's."""
    if record.median_ms is None or first.median_ms is None:
        return rate(record)
    return f"{record.median_ms / first.median_ms:.2f}x"


def cases(records: Iterable[DeviceRecord]) -> dict[tuple[str, str, str], list[DeviceRecord]]:
    """Records by stage, case and work, in the order that they came."""
    grouped: dict[tuple[str, str, str], list[DeviceRecord]] = {}
    for record in records:
        grouped.setdefault((record.stage, record.case, record.work), []).append(record)
    return grouped


def summary(records: Iterable[DeviceRecord]) -> Iterator[str]:
    for (stage, case, work), (first, *others) in cases(records).items():
        ratios = "; ".join(f"{record.implementation} {_beside(record, first)}" for record in others)
        yield f"{stage} {case} {work}: {first.implementation} {rate(first)}{f'; time of {ratios}' if ratios else ''}"
