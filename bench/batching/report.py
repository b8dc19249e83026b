"""Goals and tables of batching by length, from its records."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seqwarm_kernels.data.padding import padding_figure
from seqwarm_kernels.utils.figures import save_both

from ..common.goals import Goal, goals_table
from ..common.records import markdown

RECORDS = "cpu_batching"  #: name of the records file
FIGURE_RECORDS = "cpu_padding"  #: name of the file with the histograms of the figure
FILES_RECORDS = "cpu_files"  #: name of the file from compressed files to tensors
TEXT_FILES_RECORDS = "cpu_text_files"  #: name of the file of text in chunk files, Parquet and Arrow
PADDING, PLANNED, RESUMED = "padding", "planned", "resumed"
INFINIBATCH, PLANNER, SAMPLER, STREAM = "infinibatch", "BatchPlanner.plan", "LengthBatchSampler", "LengthBatchStream"
INFINIBATCH_SHUFFLED = "infinibatch, shuffled"
STREAM_STORED, INFINIBATCH_STORED = f"{STREAM}, stored lengths", f"{INFINIBATCH}, stored lengths"
STAGES = ("read", "plan", "encode", "pad")
GREEDY, OURS, PACKED = "infinibatch's rule", "BatchPlanner", "packed"
LARGE_ITEMS = 100_000  #: number of items from which the goals of a large corpus apply


@dataclass(frozen=True)
class BatchingRecord:
    what: str  #: the kind of measurement
    corpus: str
    implementation: str
    counted: str  #: the unit that lengths are counted in
    figures: dict[str, float] = field(default_factory=dict)
    version: str = ""  #: version of the peer's package


@dataclass(frozen=True)
class FilesRecord:
    """From compressed files to padded tensors. Medians and interquartile ranges of the repeats, in seconds."""

    corpus: str
    implementation: str
    items: int  #: whole windows
    batches: int
    cpu_seconds: float
    cpu_iqr: float
    wall_seconds: float
    wall_iqr: float
    stages: dict[str, float]  #: CPU time of each of `STAGES`
    repeats: int
    version: str = ""  #: version of the peer's package


@dataclass(frozen=True)
class TextFilesRecord:
    """An epoch of texts with their lengths. CPU time of all threads, in seconds."""

    corpus: str
    format: str
    version: str  #: of the library
    order: str
    items: int
    bytes: int  #: of the files, with lengths
    text_bytes: int
    seconds: float  #: median
    iqr: float
    repeats: int


def text_files_table(records: list[TextFilesRecord]) -> str:
    """The size of each format beside that of the text, and items a second of CPU time in each order."""
    rows = []
    for record in records:
        speed = record.items / record.seconds / 1e3
        spread = speed * record.iqr / record.seconds / 2
        size = f"{record.bytes / record.text_bytes:.0%}"
        rows.append([record.format, size, record.order, f"{speed:.0f} (± {spread:.0f})"])
    return markdown(["format", "size / text", "order", "1,000 items/s"], rows)


def files_table(records: list[FilesRecord]) -> str:
    """A table with the share of each stage in the CPU time, and the goal beside the fastest peer."""
    rows = []
    for record in records:
        shares = [f"{record.stages[stage] / sum(record.stages.values()):.0%}" for stage in STAGES]
        times = (record.cpu_seconds, record.cpu_iqr, record.wall_seconds, record.wall_iqr)
        rows.append([record.implementation, *(f"{time:.3g}" for time in times), *shares])
    table = markdown(["implementation", "CPU s", "IQR", "wall s", "IQR", *STAGES], rows)
    return f"{table}\n\n{goals_table(_files_goals(records))}"


def _files_goals(records: list[FilesRecord]) -> Iterator[Goal]:
    times = {record.implementation: record.cpu_seconds for record in records}
    for ours, peer in ((STREAM, INFINIBATCH), (STREAM_STORED, INFINIBATCH_STORED)):
        speed = times[peer] / times[ours] if peer in times else None
        yield Goal(f"CPU time from files to tensors, {peer} over {ours}", 1, speed, "x")


def batching_table(records: list[BatchingRecord]) -> str:
    """A table of all figures, and the goals."""
    rows = []
    for record in records:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in record.figures.items())
        rows.append([record.what, record.corpus, record.counted, record.implementation, figures])
    table = markdown(["what", "corpus", "tokens", "implementation", "figures"], rows)
    return f"{table}\n\n{goals_table(_goals(records))}"


def _goals(records: list[BatchingRecord]) -> Iterator[Goal]:
    yield from _padding_goals(records)
    yield from _speed_goals(records)


def _padding_goals(records: list[BatchingRecord]) -> Iterator[Goal]:
    for record in records:
        if record.what != PADDING:
            continue
        is_large = record.figures["items"] >= LARGE_ITEMS
        where = f"{record.corpus}, {record.counted}"
        if record.implementation == OURS:
            most = 3.1 if is_large else 10
            yield Goal("padding, budget and window", most, 100 * record.figures["padding"], "%", where, at_most=True)
            greedy = _beside(records, record, GREEDY)
            ratio = record.figures["batches"] / greedy.figures["batches"] if greedy else None
            yield Goal("batches beside infinibatch's rule", 1.05, ratio, "x", where, at_most=True)
        if record.implementation == PACKED:
            yield Goal("padding, packed", 0, 100 * record.figures["padding"], "%", where, at_most=True)
            used = 100 * record.figures["budget_used"]
            yield Goal("budget used, packed", 99 if is_large else None, used, "%", where)


def _speed_goals(records: list[BatchingRecord]) -> Iterator[Goal]:
    for what, ours, peer, goal in (
        (PLANNED, PLANNER, INFINIBATCH, 10),
        (PLANNED, f"{PLANNER}, packed", INFINIBATCH, None),
        (PLANNED, SAMPLER, INFINIBATCH_SHUFFLED, 10),
    ):
        for record in records:
            if (record.what, record.implementation) == (what, ours) and (other := _beside(records, record, peer)):
                ratio = record.figures["batches_per_second"] / other.figures["batches_per_second"]
                yield Goal(f"batches a second, {what}, {ours} vs {peer}", goal, ratio, "x", record.counted)
    for record in records:
        if record.what == PLANNED and record.implementation == PLANNER:
            seconds = record.figures["seconds"]
            yield Goal("a million lengths planned", 1, seconds, "s", record.counted, at_most=True)
        if record.what == RESUMED and record.implementation != INFINIBATCH:
            resumed = record.figures["milliseconds"]
            yield Goal(f"resumed after a million items, {record.implementation}", 50, resumed, "ms", at_most=True)


def _beside(records: list[BatchingRecord], record: BatchingRecord, implementation: str) -> BatchingRecord | None:
    def key(each: BatchingRecord) -> tuple[str, str, str]:
        return each.what, each.corpus, each.counted

    return next((r for r in records if r.implementation == implementation and key(r) == key(record)), None)


# ---- the figure


def figure_report(lines: list[dict[str, Any]], figures: Path) -> str:
    rows = []
    for line in lines:
        save_both(functools.partial(padding_figure, line), figures / "padding.png")
        rows += [[way["name"], f"{way['batches']:,}", f"{way['padding']:.1%}"] for way in line["ways"]]
    return markdown(["batching", "batches", "padding"], rows)
