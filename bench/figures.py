"""The report's figures: speed over length, what skipping and segments bring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from .alibi_attention.gpu import BOTH, FORWARD
from .alibi_attention.peers import FLASH, FLEX
from .gpu.lookup import OURS, Records, gigabytes_per_second, speedup, teraflops
from .gpu.records import DeviceRecord

Curves = dict[str, list[tuple[int, float]]]


def draw_all(records: Records, folder: Path) -> list[Path]:
    """Those that there are records for."""
    drawn: list[Path | None] = []
    for head_dim in (64, 128):
        for work in (FORWARD, BOTH):
            name = f"attention_d{head_dim}_{work.replace(' + ', '_')}.png"
            title = f"Causal {work}, head_dim {head_dim}"
            curves = _over_length(records, head_dim, work, teraflops)
            drawn.append(_draw(curves, folder / name, title, "tokens", "dense-equivalent TFLOP/s"))
    drawn.append(
        _draw(
            _speedups(records), folder / "attention_speedup.png", "alibi_attention, causal", "tokens", "times as fast"
        )
    )
    segments = _by_size(records.of_stage("segments"), FORWARD, "segment_length", gigabytes_per_second)
    path = folder / "attention_segments.png"
    title = "Segments in 64k tokens, forward"
    drawn.append(_draw(segments, path, title, "segment_length", "GB/s", ceiling=records.copy_rate()))
    return [path for path in drawn if path is not None]


def _over_length(records: Records, head_dim: int, work: str, measure: Callable[[DeviceRecord], float | None]) -> Curves:
    found = [*records.of_stage("long"), *records.of_stage("lengths")]
    same = [r for r in found if r.facts.get("head_dim") == head_dim and r.facts.get("causal")]
    rows = [r for r in same if r.facts["heads"] == r.facts["key_heads"] and _is_standard(r)]
    return _by_size(rows, work, "length", measure)


def _is_standard(record: DeviceRecord) -> bool:
    """16k tokens, or one row."""
    return record.facts["batch_size"] == max(1, 16384 // record.facts["length"])


def _by_size(
    found: list[DeviceRecord], work: str, size: str, measure: Callable[[DeviceRecord], float | None]
) -> Curves:
    curves: Curves = {}
    for record in found:
        number = measure(record)
        if number is not None and record.work == work and record.inputs == "a":
            curves.setdefault(record.implementation, []).append((record.facts[size], number))
    return {name: sorted(points) for name, points in curves.items()}


def _speedups(records: Records) -> Curves:
    """Over FlexAttention, and over flash attention without any bias."""
    curves: Curves = {}
    for head_dim in (64, 128):
        for work in (FORWARD, BOTH):
            for record in records.each(OURS, work, head_dim=head_dim, causal=True, segment_length=None):
                for label, other in (("FlexAttention", FLEX.name), ("flash, no bias", FLASH.name)):
                    ratio = speedup(record, records.beside(record, other))
                    standard = record.facts["heads"] == record.facts["key_heads"] and _is_standard(record)
                    if ratio is not None and standard:
                        name = f"vs {label}, {work}, D{head_dim}"
                        curves.setdefault(name, []).append((record.facts["length"], ratio))
    return {name: sorted(points) for name, points in curves.items()}


def _draw(
    curves: Curves, path: Path, title: str, x_label: str, y_label: str, *, ceiling: float | None = None
) -> Path | None:
    if not curves:
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, points in curves.items():
        ours = name.startswith("alibi_attention")
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, linewidth=2 if ours else 1)
    if ceiling is not None:
        axes.axhline(ceiling, color="grey", linestyle=":", label="copy")
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path
