"""Figures of alibi_attention: speed over length on a CPU and on a GPU, skipping and segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from ..common.records import CpuRecord
from ..gpu.records import DeviceRecord, DeviceRecords, gigabytes_per_second, speedup, teraflops
from .cases import BOTH, FORWARD
from .peers import FLASH, FLEX, OURS

Curves = dict[str, list[tuple[int, float]]]


# ---- on a CPU


def draw_cpu(records: list[CpuRecord], folder: Path) -> list[Path]:
    """Microseconds for each token and head, over the length."""
    panels = [(work, dtype) for work in (FORWARD, BOTH) for dtype in ("torch.float32", "torch.bfloat16")]
    curves = [_cpu_curves(records, work, dtype) for work, dtype in panels]
    if not any(curves):
        return []
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(9, 6.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for axis, (work, dtype), found in zip(axes.flat, panels, curves, strict=True):
        for name, points in found.items():
            width = 2 if name.startswith(f"{OURS} native") else 1
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, linewidth=width)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{work}, {dtype.removeprefix('torch.')}", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("µs for each token and head", fontsize=9)
    path = folder / "cpu_attention.png"
    figure.savefig(path, dpi=130)
    return [path]


def _cpu_curves(records: list[CpuRecord], work: str, dtype: str) -> Curves:
    curves: Curves = {}
    most_threads = max((record.threads for record in records), default=0)
    wanted = {"work": work, "dtype": dtype, "inputs": "a", "head_dim": 64, "segment_length": None}
    for record in records:
        facts = record.facts
        if record.threads == most_threads and all(facts.get(name) == value for name, value in wanted.items()):
            tokens = facts["batch_size"] * facts["length"] * facts["heads"]
            curves.setdefault(record.implementation, []).append((facts["length"], record.median_ms * 1e3 / tokens))
    return {name: sorted(points) for name, points in sorted(curves.items())}


# ---- on a GPU


def draw_device(records: DeviceRecords, folder: Path, copy_rate: float | None) -> list[Path]:
    """Every figure that has records."""
    drawn: list[Path | None] = []
    for head_dim in (64, 128):
        for work in (FORWARD, BOTH):
            dense = records.of_stages("long", "lengths").all
            found = [r for r in dense if r.facts.get("head_dim") == head_dim and _is_plain(r)]
            curves = _by_size(found, work, "length", teraflops)
            path = folder / f"attention_d{head_dim}_{work.replace(' + ', '_')}.png"
            drawn.append(
                _draw(curves, path, f"Causal {work}, head_dim {head_dim}", "tokens", "dense-equivalent TFLOP/s")
            )
    path = folder / "attention_speedup.png"
    drawn.append(_draw(_speedups(records), path, "alibi_attention, causal", "tokens", "times as fast"))
    curves = _by_size(records.of_stages("segments").all, FORWARD, "segment_length", gigabytes_per_second)
    path, title = folder / "attention_segments.png", "Segments in 64k tokens, forward"
    drawn.append(_draw(curves, path, title, "segment_length", "GB/s", ceiling=copy_rate))
    return [path for path in drawn if path is not None]


def _is_plain(record: DeviceRecord) -> bool:
    """Causal, without shared key heads, 16k tokens in a batch or one longer row."""
    facts = record.facts
    if not facts.get("causal") or facts["heads"] != facts["key_heads"]:
        return False
    return facts["batch_size"] == max(1, 16384 // facts["length"])


def _by_size(
    records: Iterable[DeviceRecord], work: str, size: str, value_of: Callable[[DeviceRecord], float | None]
) -> Curves:
    curves: Curves = {}
    for record in records:
        value = value_of(record)
        if value is not None and record.work == work and record.inputs == "a":
            curves.setdefault(record.implementation, []).append((record.facts[size], value))
    return {name: sorted(points) for name, points in curves.items()}


def _speedups(records: DeviceRecords) -> Curves:
    """Speedups over FlexAttention, and over flash attention without a bias."""
    curves: Curves = {}
    for head_dim in (64, 128):
        for work in (FORWARD, BOTH):
            for record in records.timed(OURS, work, head_dim=head_dim, segment_length=None):
                for label, other in (("FlexAttention", FLEX.name), ("flash, no bias", FLASH.name)):
                    ratio = speedup(record, records.beside(record, other))
                    if ratio is not None and _is_plain(record):
                        name = f"vs {label}, {work}, D{head_dim}"
                        curves.setdefault(name, []).append((record.facts["length"], ratio))
    return {name: sorted(points) for name, points in curves.items()}


def _draw(
    curves: Curves, path: Path, title: str, x_label: str, y_label: str, *, ceiling: float | None = None
) -> Path | None:
    if not curves:
        return None
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        width = 2 if name.startswith(OURS) else 1
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, linewidth=width)
    if ceiling is not None:
        axes.axhline(ceiling, color="gray", linestyle=":", label="copy")
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    return path
