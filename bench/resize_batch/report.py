"""Goals and figures of resize_batch, from its records on a CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from seqwarm_kernels.utils.figures import ink, new_figure

from ..common.figures import log_axis, plot
from ..common.goals import Goal, worst
from ..common.records import CpuRecord
from ..gpu.records import DeviceRecord, DeviceRecords, speedup
from .implementations import BY_HAND, COMPILED, FOREACH, METHODS, OURS, OURS_OUT, OURS_VIEWS, VIEWS, with_backend

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RECORDS = "cpu_resize_batch"  #: name of the records file of the CPU benchmark
CALLS = "cpu_resize_calls"  #: with a file for each kind of CPU
PACKED = "cpu_resize_packed"  #: the same


# ---- on a CPU


def _most_threads(records: list[CpuRecord]) -> list[CpuRecord]:
    most = max((record.threads for record in records), default=0)
    return [record for record in records if record.threads == most]


def cpu_figure(records: list[CpuRecord]) -> Figure:
    """Speed relative to the same written by hand: rows are shapes of the batch, points are implementations."""
    shapes = sorted({_shape(record) for record in records})
    names = list(dict.fromkeys(name for method in METHODS for name in cpu_speeds(records, method)))
    figure = new_figure(11, 7.6)
    panels = figure.subplots(2, 3, sharex=True, sharey=True)
    for axes, method in zip(panels.flat, METHODS, strict=True):
        for name, points in cpu_speeds(records, method).items():
            shift = 0.2 * (names.index(name) - (len(names) - 1) / 2)  # so that no point hides another
            heights = [shapes.index(shape) + shift for shape, _ in points]
            plot(axes, name, [speed for _, speed in points], heights, linestyle="none")
        log_axis(axes.xaxis)
        axes.set_title(method)
        axes.set_yticks(range(len(shapes)), [shape.label() for shape in shapes])
        axes.axvline(1, color=ink(), linestyle=(0, (4, 3)), linewidth=1, zorder=1.5)
        axes.set_ylim(len(shapes) - 0.5, -0.5)
    panels[0, 0].set_ylabel("int64 tensors × rows × tokens")
    panels[1, 0].set_ylabel("int64 tensors × rows × tokens")
    figure.supxlabel(f"times as fast as {BY_HAND} (right of the dashed line is faster)", fontsize=10)
    handles = {line.get_gid(): line for axes in panels.flat for line in axes.lines if line.get_gid()}
    figure.legend([handles[name] for name in names], names, loc="outside upper center", ncols=2)
    return figure


class _Shape(NamedTuple):
    megabytes: float
    tensors: int
    rows: int
    tokens: int

    def label(self) -> str:
        size = f"{self.megabytes:.0f}" if self.megabytes >= 10 else f"{self.megabytes:.1g}"
        return f"{self.tensors} × {self.rows:,} × {self.tokens:,}, {size} MB"


def _shape(record: CpuRecord) -> _Shape:
    facts = record.facts
    return _Shape(facts["source_megabytes"], facts["tensors"], facts["rows"], facts["tokens"])


def cpu_speeds(records: list[CpuRecord], method: str) -> dict[str, list[tuple[_Shape, float]]]:
    """Speeds of the implementations that copy, by shape. The time of a view does not depend on the batch."""
    same = [record for record in _most_threads(records) if record.facts["method"] == method]
    by_hand = {record.case: record.median_ms for record in same if record.implementation == BY_HAND}
    speeds: dict[str, list[tuple[_Shape, float]]] = {}
    for record in same:
        if record.implementation not in (BY_HAND, VIEWS, OURS_VIEWS):
            point = _shape(record), by_hand[record.case] / record.median_ms
            speeds.setdefault(record.implementation, []).append(point)
    return {name: sorted(points) for name, points in speeds.items()}


# ---- on a GPU


def device_goals(records: DeviceRecords) -> Iterator[Goal]:
    timed = [record for record in records.of_stages("resize_batch").all if record.median_ms is not None]
    ours, out = with_backend(OURS, "triton"), with_backend(OURS_OUT, "triton")
    same = _of(timed, ours)
    launched = max((record.figures["launches"] for record in same if "launches" in record.figures), default=None)
    yield Goal(f"{ours}, launches, worst", 1, launched, at_most=True)
    small = next((r for r in same if r.facts["source_megabytes"] < 1 and r.facts["method"] == "truncate"), None)
    waited = small.figures.get("wait_ms") if small else None
    yield Goal(f"{ours}, host time, small batch", 15, waited and waited * 1e3, "µs", at_most=True)
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
