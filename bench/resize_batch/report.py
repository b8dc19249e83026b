"""Goals and figures of resize_batch, from its records on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..common.goals import Goal, goals_table, worst
from ..common.records import CpuRecord, table
from ..gpu.records import DeviceRecord, DeviceRecords, speedup
from .implementations import BY_HAND, COMPILED, FOREACH, METHODS, OURS, OURS_OUT, with_backend

RECORDS = "cpu_resize_batch"  #: name of the records file of the CPU benchmark
SMALL_MEGABYTES = 1.0  #: a smaller batch is resized so fast that the cost of the call itself counts
LARGE_MEGABYTES = 64.0


# ---- on a CPU


def report(lines: list[dict[str, Any]], figures: Path) -> str:
    """Table and goals in Markdown. Figures are drawn into the folder `figures`."""
    records = [CpuRecord(**line) for line in lines]
    drawn = [f"![{path.stem}]({path.name})" for path in draw_cpu(records, figures)]
    return "\n\n".join([table(records), goals_table(cpu_goals(records)), *drawn])


def _most_threads(records: list[CpuRecord]) -> list[CpuRecord]:
    most = max((record.threads for record in records), default=0)
    return [record for record in records if record.threads == most]


def cpu_goals(records: list[CpuRecord]) -> Iterator[Goal]:
    threaded = _most_threads(records)
    by_hand = {record.case: record for record in threaded if record.implementation == BY_HAND}
    pairs = [(each, by_hand[each.case]) for each in threaded if each.implementation == OURS and each.case in by_hand]
    ratio, where = worst(
        (other.median_ms / ours.median_ms, ours.case)
        for ours, other in pairs
        if ours.facts["source_megabytes"] > LARGE_MEGABYTES
    )
    yield Goal(f"over {LARGE_MEGABYTES:.0f} MB, vs {BY_HAND}, worst", 1.5, ratio, "x", where)
    small = [
        ((ours.median_ms - other.median_ms) / max(0.1 * other.median_ms, 5e-3), ours.case)
        for ours, other in pairs
        if ours.facts["source_megabytes"] < SMALL_MEGABYTES
    ]
    slowest, where = max(small, default=(None, ""))
    yield Goal(
        f"under {SMALL_MEGABYTES:.0f} MB, time beyond {BY_HAND} as a share of 5 µs or of 10 % if that is more, worst",
        1, slowest, "", where, at_most=True,
    )  # fmt: skip


def draw_cpu(records: list[CpuRecord], folder: Path) -> list[Path]:
    """Speed relative to the same written by hand, over the size of the batch."""
    curves = {method: _cpu_curves(records, method) for method in METHODS}
    if not any(curves.values()):
        return []
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(10, 5.6), layout="constrained")
    axes = figure.subplots(2, 3, sharex=True, sharey=True)
    handles = {}
    for axis, (method, found) in zip(axes.flat, curves.items(), strict=True):
        for index, (name, points) in enumerate(found.items()):
            width = 2 if name.startswith(OURS) else 1
            (handles[name],) = axis.plot(
                *zip(*points, strict=True), marker="o", markersize=3, linewidth=width, color=f"C{index}"
            )
        axis.axhline(1, color="gray", linestyle=":")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(method, fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=7)
    figure.supxlabel("MB of the batch", fontsize=9)
    figure.supylabel(f"speed of {BY_HAND} = 1", fontsize=9)
    path = folder / "cpu_resize_batch.png"
    figure.savefig(path, dpi=130)
    return [path]


def _cpu_curves(records: list[CpuRecord], method: str) -> dict[str, list[tuple[float, float]]]:
    same = [record for record in _most_threads(records) if record.facts["method"] == method]
    by_hand = {record.case: record.median_ms for record in same if record.implementation == BY_HAND}
    curves: dict[str, list[tuple[float, float]]] = {}
    for record in same:
        if record.implementation != BY_HAND:
            point = record.facts["source_megabytes"], by_hand[record.case] / record.median_ms
            curves.setdefault(record.implementation, []).append(point)
    return {name: sorted(points) for name, points in curves.items()}


# ---- on a GPU


def device_goals(records: DeviceRecords) -> Iterator[Goal]:
    timed = [record for record in records.of_stages("resize_batch").all if record.median_ms is not None]
    for backend, most_us in (("native", 6), ("triton", 15)):
        ours, out = with_backend(OURS, backend), with_backend(OURS_OUT, backend)
        same = _of(timed, ours)
        launched = max((record.figures["launches"] for record in same if "launches" in record.figures), default=None)
        yield Goal(f"{ours}, launches, worst", 1, launched, at_most=True)
        small = next((r for r in same if r.facts["source_megabytes"] < 1 and r.facts["method"] == "truncate"), None)
        waited = small.figures.get("wait_ms") if small else None
        yield Goal(f"{ours}, host time, small batch", most_us, waited and waited * 1e3, "µs", at_most=True)
        large = [record for record in same if record.facts["source_megabytes"] > 500]
        share, where = worst((records.share_of_copy(record), record.case) for record in large)
        yield Goal(f"{ours}, large, share of a copy, worst", 80, share and 100 * share, "%", where)
        for other in (BY_HAND, FOREACH, COMPILED):
            name = out if other == FOREACH else ours
            ratio, where = worst(
                (speedup(record, peer), record.case)
                for record in _of(timed, name)
                for peer in _of(timed, other)
                if peer.case == record.case
            )
            yield Goal(f"{name} vs {other}, worst", 1, ratio, "x", where)


def _of(records: list[DeviceRecord], implementation: str) -> list[DeviceRecord]:
    return [record for record in records if record.implementation == implementation]
