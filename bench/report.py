"""Figures under docs/figures and tables in Markdown from the records under bench/results.

Invents nothing: what has no record is "not yet measured".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import cpu_goals
from .batching import report as batching_records
from .common.records import RESULTS, Record, table
from .cpu_figures import draw_cpu_attention, draw_cpu_resizing
from .figures import draw_all
from .gpu.lookup import Records
from .gpu.records import DeviceRecord, read
from .report_tables import attention_table, failures_list, goal_rows, goals_table, segments_table, stage_table

FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--records", type=Path, default=RESULTS, help="folder with records")
    parser.add_argument("--figures", type=Path, default=FIGURES, help="folder for the figures")


def main(arguments: argparse.Namespace) -> None:
    for path in sorted(arguments.records.glob("cpu_*.jsonl")):
        if (text := _cpu(path, arguments.figures)) is not None:
            print(f"## {path.stem}\n\n{text}\n")
    print("## On a GPU\n")
    paths = sorted(arguments.records.glob("device*.jsonl"))
    if not paths:
        print("Not yet measured: `python -m bench device` writes the records.")
    found: dict[tuple[str, ...], DeviceRecord] = {}
    for path in paths:  # of the same measurement the last one counts
        environment, read_records = read(path)
        print(f"{path.name}: " + ", ".join(f"{name} {value}" for name, value in environment.items() if value) + "\n")
        found |= {record.key(): record for record in read_records}
    records = Records(found.values())
    print(goals_table(records))
    stages = [stage_table(records, stage) for stage in ("packed", "host", "resize_batch", "allocator", "tuned")]
    for text in (attention_table(records), segments_table(records), *stages, failures_list(records)):
        if text:
            print(f"\n{text}")
    for path in draw_all(records, arguments.figures):
        print(f"\n![{path.stem}]({path.name})")


def _cpu(path: Path, figures: Path) -> str | None:
    first, *lines = path.read_text().splitlines()
    if path.stem == "cpu_batching":
        batching = [batching_records.BatchingRecord(**json.loads(line)) for line in lines]
        return f"{batching_records.table(batching)}\n\n{goal_rows(batching_records.goals(batching))}"
    try:
        records = [Record(**json.loads(line)) for line in lines]
    except TypeError:  # the demo's records are of another kind
        return None
    parts = [", ".join(f"{name} {value}" for name, value in json.loads(first).items()), table(records)]
    parts.append(cpu_goals.goals_table(records))
    draw = {"alibi_attention": draw_cpu_attention, "resize_batch": draw_cpu_resizing}[records[0].operator]
    if (drawn := draw(records, figures)) is not None:
        parts.append(f"![{drawn.stem}]({drawn.name})")
    return "\n\n".join(parts)
