"""From records under bench/results to figures under docs/figures and tables in Markdown. Invents nothing: what has no
record is "not yet measured"."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .device_records import DeviceRecord
from .measure import RESULTS
from .summary import cases, gigabytes_per_second, rate, teraflops

FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=Path, default=RESULTS / "device.jsonl")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures")


def main(arguments: argparse.Namespace) -> None:
    if not arguments.records.exists():
        print(
            f"On a GPU: not yet measured ({arguments.records.name} is not there; `python -m bench device` writes it)."
        )
        return
    environment, records = read(arguments.records)
    print(", ".join(f"{name} {value}" for name, value in environment.items() if value), end="\n\n")
    print(table(records))
    for path in draw_all(records, arguments.figures):
        print(f"\n![{path.stem}]({path.name})")


def read(path: Path) -> tuple[dict[str, Any], list[DeviceRecord]]:
    first, *lines = path.read_text().splitlines()
    return json.loads(first), [DeviceRecord(**json.loads(line)) for line in lines]


def table(records: list[DeviceRecord]) -> str:
    """A row for each implementation of each case, its time relative to the case's first."""
    rows = ["| case | work | implementation | result | its time / the first's |", "|---|---|---|---|---|"]
    for (_, case, work), (first, *others) in cases(records).items():
        for record in (first, *others):
            both = record.median_ms is not None and first.median_ms is not None
            ratio = f"{record.median_ms / first.median_ms:.2f}" if both else ""  # type: ignore[operator]
            rows.append(f"| {case} | {work} | {record.implementation} | {rate(record)} | {ratio} |")
    return "\n".join(rows)


def draw_all(records: list[DeviceRecord], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for head_dim in (64, 128):
        for work in ("forward", "forward + backward"):
            chosen = [
                record
                for record in records
                if record.case.startswith("causal") and f"D{head_dim}," in record.case and record.work == work
                if record.case.endswith("inputs a")
            ]
            name = f"attention_d{head_dim}_{work.replace(' + ', '_')}"
            title = f"Causal {work}, head_dim {head_dim}"
            if curves := by_implementation(chosen, " S", teraflops):
                paths.append(draw(curves, folder / f"{name}.png", title, "tokens", "dense-equivalent TFLOP/s"))
    segments = [record for record in records if record.case.startswith("segments") and record.work == "forward"]
    if curves := by_implementation(segments, " L", gigabytes_per_second):
        copies = [gigabytes_per_second(record) for record in records if record.stage == "copy"]
        ceiling = next((copy for copy in copies if copy is not None), None)
        path = folder / "attention_segments.png"
        paths.append(draw(curves, path, "Segments in 64k tokens, forward", "segment_length", "GB/s", ceiling))
    return paths


def by_implementation(
    records: list[DeviceRecord], letter: str, measure: Callable[[DeviceRecord], float | None]
) -> dict[str, list[tuple[int, float]]]:
    """For each implementation, (size, value) by size; the size stands in the case behind `letter`."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in records:
        value = measure(record)
        if value is not None:
            size = int(record.case.split(letter)[1].replace(",", " ").split()[0])
            curves.setdefault(record.implementation, []).append((size, value))
    return {name: sorted(points) for name, points in curves.items()}


def draw(
    curves: dict[str, list[tuple[int, float]]],
    path: Path,
    title: str,
    x_label: str,
    y_label: str,
    ceiling: float | None = None,
) -> Path:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for name, points in curves.items():
        ours = name.startswith("alibi_attention")
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name, linewidth=2 if ours else 1)
    if ceiling is not None:
        axes.axhline(ceiling, color="grey", linestyle=":", label="copy")
    axes.set_xscale("log", base=2)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)
    plt.close(figure)
    return path
