"""Figures of alibi_attention: time over length on a CPU, speedup over length on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from seqwarm_kernels.utils.figures import ink, new_figure

from ..common.figures import label_lines, log_axis, mark, plot, save_both
from ..common.records import CpuRecord
from ..gpu.records import DeviceRecord, DeviceRecords, speedup
from .cases import BOTH, FORWARD
from .peers import CUDNN, CUDNN_MASK, EAGER, FLEX, OURS
from .report import STAGES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Curves = dict[str, list[tuple[int, float]]]
REFERENCE = f"{OURS} reference"  #: the definition, which is not made to be fast


# ---- on a CPU


_CPU_PANELS = [(work, dtype) for work in (FORWARD, BOTH) for dtype in ("torch.float32", "torch.bfloat16")]


def cpu_figure(records: list[CpuRecord]) -> Figure:
    """Microseconds per token over the length, with all heads."""
    figure = new_figure(11, 8)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    for axes, (work, dtype) in zip(panels.flat, _CPU_PANELS, strict=True):
        _draw_curves(axes, cpu_curves(records, work, dtype))
        log_axis(axes.yaxis)
        axes.set_title(f"{work}, {dtype.removeprefix('torch.')}")
    for axes in panels[1]:
        axes.set_xlabel("tokens in a sequence")
    for axes in panels[:, 0]:
        axes.set_ylabel("µs per token, 12 heads")
    _label_lines(panels.flat, bold=OURS)
    figure.suptitle("Causal attention with ALiBi on a CPU: time per token (lower is better)")
    return figure


def cpu_curves(records: list[CpuRecord], work: str, dtype: str) -> Curves:
    """Microseconds per token by length, with the most threads, 12 heads of 64 components."""
    curves: Curves = {}
    most_threads = max((record.threads for record in records), default=0)
    wanted = {"work": work, "dtype": dtype, "inputs": "a", "head_dim": 64, "segment_length": None}
    for record in records:
        facts = record.facts
        if record.threads == most_threads and all(facts.get(name) == value for name, value in wanted.items()):
            per_token = record.median_ms * 1e3 / (facts["batch_size"] * facts["length"]) * (12 / facts["heads"])
            curves.setdefault(_without_backend(record.implementation), []).append((facts["length"], per_token))
    curves.pop(REFERENCE, None)
    return {name: sorted(points) for name, points in sorted(curves.items())}


def _without_backend(implementation: str) -> str:
    return implementation.replace(" native", "").replace(" triton", "")


def _draw_curves(axes: Axes, curves: Curves) -> None:
    for name, points in curves.items():
        plot(axes, name, *zip(*points, strict=True))
    lengths = sorted({length for points in curves.values() for length, _ in points})
    if lengths:
        log_axis(axes.xaxis, sorted({*lengths[:: 1 + len(lengths) // 8], lengths[-1]}))


def _label_lines(panels: Iterable[Axes], bold: str = "") -> None:
    """Labels whose dotted leaders do not look as if a line went on after its last point."""
    panels = list(panels)
    label_lines(panels, bold)
    for axes in panels:
        for label in _labels(axes):
            label.arrow_patch.set(color=ink(), linestyle=(0, (1, 3)))


def _labels(axes: Axes) -> list[Any]:
    """The labels of lines: annotations with leaders."""
    return [text for text in axes.texts if getattr(text, "arrow_patch", None)]


# ---- on a GPU

_FEWEST_LENGTHS = 3  # of a curve over lengths


def draw_device(every: DeviceRecords, folder: Path) -> None:
    """Speedups of the head dims that have curves over lengths."""
    records = every.of_stages(*STAGES)
    speedups = {head_dim: [_speedups(records, work, head_dim) for work in (FORWARD, BOTH)] for head_dim in (64, 128)}
    longest = {
        head_dim: max((len(points) for curves in both for points in curves.values()), default=0)
        for head_dim, both in speedups.items()
    }
    columns = {head_dim: both for head_dim, both in speedups.items() if longest[head_dim] >= _FEWEST_LENGTHS}
    if columns:
        save_both(functools.partial(_speedup_figure, columns), folder / "attention_speedup.png")


def is_plain(record: DeviceRecord) -> bool:
    """Causal, without shared key heads, 16k tokens in a batch or one longer row."""
    facts = record.facts
    if not facts.get("causal") or facts["heads"] != facts["key_heads"]:
        return False
    return facts["batch_size"] == max(1, 16384 // facts["length"])


def _speedups(records: DeviceRecords, work: str, head_dim: int) -> Curves:
    """Speedups of alibi_attention over its peers; flash attention computes without a bias."""
    curves: Curves = {}
    for record in records.timed(OURS, work, head_dim=head_dim, segment_length=None):
        for peer in (FLEX, CUDNN_MASK, EAGER, CUDNN):
            ratio = speedup(record, records.beside(record, peer.name))
            if ratio is not None and is_plain(record):
                curves.setdefault(peer.name, []).append((record.facts["length"], ratio))
    return {name: sorted(points) for name, points in curves.items()}


def _speedup_figure(speedups: dict[int, list[Curves]]) -> Figure:
    """A column for each head_dim, forward above forward and backward."""
    figure = new_figure(6.5 * len(speedups) + 1.5, 7)
    panels = figure.subplots(2, len(speedups), sharex=True, sharey=True, squeeze=False)
    for column, (head_dim, both) in zip(panels.T, speedups.items(), strict=True):
        for axes, work, curves in zip(column, (FORWARD, BOTH), both, strict=True):
            _draw_curves(axes, curves)
            axes.set_title(f"{work}, head dimension {head_dim}")
            log_axis(axes.yaxis)
            mark(axes, "equally fast", y=1, at=0.01)
    figure.supxlabel("tokens in a sequence", fontsize=10)
    figure.supylabel("alibi_attention is this many times as fast", fontsize=10)
    _label_lines(panels.flat)
    for axes in panels.flat:  # there is room for labels right of the last points
        for label in _labels(axes):
            place, _ = (axes.transData - axes.transAxes).transform(label.xy)
            label.set_x(place + 0.03)
    figure.suptitle("Causal alibi_attention beside others on a GPU")
    return figure
