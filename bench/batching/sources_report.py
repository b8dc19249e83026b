"""Tables of the benchmarks of sources, from their records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..common.goals import Goal, goals_table
from ..common.records import markdown

LARGE_RECORDS = "cpu_large_corpus"  #: name of the records file of a billion tokens
READERS_RECORDS = "cpu_readers"  #: name of the records file of formats and their readers
ORDERS, CACHES = ("file order", "shuffled"), ("cold", "warm")
FIRST_BATCH, RESUME = "first batch", "resume"


@dataclass(frozen=True)
class LargeCorpusRecord:
    what: str
    tokens: int
    documents: int
    cache: str  #: "cold" or "warm"
    seconds: float  #: median
    iqr: float
    figures: dict[str, float] = field(default_factory=dict)  #: medians, but the largest peak_megabytes
    repeats: int = 1
    conditions: str = ""  #: scheduling, and what else ran


@dataclass(frozen=True)
class ReaderRecord:
    """An epoch of documents, read one after another."""

    format: str
    reader: str
    version: str  #: of the library
    order: str  #: one of `ORDERS`
    cache: str  #: one of `CACHES`
    items: int
    tokens: int
    seconds: float  #: median
    iqr: float
    repeats: int
    conditions: str  #: scheduling, and what else ran


def large_corpus_table(records: list[LargeCorpusRecord]) -> str:
    return f"{large_corpus_rows(records)}\n\n{goals_table(_large_goals(records))}"


def large_corpus_rows(records: list[LargeCorpusRecord]) -> str:
    header = ["", "cache", "time", "IQR", "peak memory (RSS)", "anonymous at the end"]
    rows = [
        [
            record.what,
            record.cache,
            _time(record.seconds),
            _time(record.iqr) if record.repeats > 1 else "",
            f"{record.figures['peak_megabytes']:.0f} MB",
            f"{record.figures['anonymous_megabytes']:.0f} MB",
        ]
        for record in records
    ]
    return markdown(header, rows)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _large_goals(records: list[LargeCorpusRecord]) -> Iterator[Goal]:
    for record in records:
        where = f"{record.what}, {record.cache}"
        peak = record.figures["peak_megabytes"]
        yield Goal("memory of the process", 500, peak, "MB", where, at_most=True)
        if record.what.startswith(FIRST_BATCH):
            yield Goal("time to the first batch", 2, record.seconds, "s", where, at_most=True)
        if record.what == RESUME:
            yield Goal("time to resume", 100, 1000 * record.seconds, "ms", where, at_most=True)


def readers_table(records: list[ReaderRecord]) -> str:
    """A row for each record."""
    header = ["format", "reader", "order", "cache", "seconds", "IQR", "M tokens/s", "k items/s", "version"]
    rows = [
        [
            *(record.format, record.reader, record.order, record.cache, f"{record.seconds:.3g}", f"{record.iqr:.2g}"),
            *(f"{record.tokens / record.seconds / 1e6:.3g}", f"{record.items / record.seconds / 1e3:.3g}"),
            record.version,
        ]
        for record in records
    ]
    return markdown(header, rows)


def readers_page(records: list[ReaderRecord]) -> str:
    """A row for each reader: million tokens a second, with half the interquartile range, and items a second."""
    speeds: dict[tuple[str, str, str], dict[tuple[str, str], str]] = {}
    for record in records:
        reader = speeds.setdefault((record.format, record.reader, record.version), {})
        reader[record.order, record.cache] = _speed(record)
    cases = [(order, cache) for order in ORDERS for cache in CACHES]
    rows = [
        [each, f"{reader} ({library})" if library else f"`{reader}`", *(found[case] for case in cases)]
        for (each, reader, library), found in speeds.items()
    ]
    return markdown(["format", "reader", *(f"{order}, {cache}" for order, cache in cases)], rows)


def _speed(record: ReaderRecord) -> str:
    speed = record.tokens / record.seconds / 1e6
    spread = speed * record.iqr / record.seconds / 2
    return f"{speed:.3g} M (± {spread:.2g}), {1e3 * round(record.items / record.seconds / 1e3):,.0f}"
