"""The report's figures of runs on a CPU."""

from __future__ import annotations

from pathlib import Path

from .alibi_attention.gpu import BOTH, FORWARD
from .common.records import Record
from .figures import Curves
from .resize_batch.implementations import BY_HAND, METHODS


def draw_cpu_attention(records: list[Record], folder: Path) -> Path | None:
    """Attention on the CPU: microseconds for each token and head, over the length."""
    panels = [(work, dtype) for work in (FORWARD, BOTH) for dtype in ("torch.float32", "torch.bfloat16")]
    curves = [_attention_curves(records, work, dtype) for work, dtype in panels]
    if not any(curves):
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.4), layout="constrained", sharex=True)
    for axis, (work, dtype), found in zip(axes.flat, panels, curves, strict=True):
        for name, points in found.items():
            ours = name.startswith("alibi_attention native")
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, linewidth=2 if ours else 1)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_title(f"{work}, {dtype.removeprefix('torch.')}", fontsize=9)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=7)
    figure.supxlabel("tokens", fontsize=9)
    figure.supylabel("µs for each token and head", fontsize=9)
    path = folder / "cpu_attention.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _attention_curves(records: list[Record], work: str, dtype: str) -> Curves:
    curves: Curves = {}
    most_threads = max((record.threads for record in records), default=0)
    wanted = {"work": work, "dtype": dtype, "inputs": "a", "head_dim": 64, "segment_length": None}
    for record in records:
        facts = record.facts
        if record.threads == most_threads and all(facts.get(name) == value for name, value in wanted.items()):
            tokens = facts["batch_size"] * facts["length"] * facts["heads"]
            curves.setdefault(record.implementation, []).append((facts["length"], record.median_ms * 1e3 / tokens))
    return {name: sorted(points) for name, points in sorted(curves.items())}


def draw_cpu_resizing(records: list[Record], folder: Path) -> Path | None:
    """How many times as fast as by hand, over the size of the batch."""
    curves = {method: _resizing_curves(records, method) for method in METHODS}
    if not any(curves.values()):
        return None
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    figure, axes = plt.subplots(2, 3, figsize=(10, 5.6), layout="constrained", sharex=True, sharey=True)
    handles = {}
    for axis, (method, found) in zip(axes.flat, curves.items(), strict=True):
        for index, (name, points) in enumerate(found.items()):
            width = 2 if name.startswith("resize_batch") else 1
            (handles[name],) = axis.plot(
                *zip(*points, strict=True), marker="o", markersize=3, linewidth=width, color=f"C{index}"
            )
        axis.axhline(1, color="grey", linestyle=":")
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.set_title(method, fontsize=9)
        axis.grid(alpha=0.3)
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=7)
    figure.supxlabel("MB of the batch", fontsize=9)
    figure.supylabel(f"speed of {BY_HAND} = 1", fontsize=9)
    path = folder / "cpu_resize_batch.png"
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _resizing_curves(records: list[Record], method: str) -> dict[str, list[tuple[float, float]]]:
    most_threads = max((record.threads for record in records), default=0)
    same = [r for r in records if r.threads == most_threads and r.facts["method"] == method]
    by_hand = {record.case: record.median_ms for record in same if record.implementation == BY_HAND}
    curves: dict[str, list[tuple[float, float]]] = {}
    for record in same:
        if record.implementation != BY_HAND:
            point = record.facts["source_megabytes"], by_hand[record.case] / record.median_ms
            curves.setdefault(record.implementation, []).append(point)
    return {name: sorted(points) for name, points in curves.items()}
