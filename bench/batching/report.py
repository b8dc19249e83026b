"""Tables and the figure of batching by length and of sources, from their records."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from seqwarm_kernels.data.padding import padding_figure

from ..common.records import markdown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Names of the records files: batching, the histograms of the figure, from compressed files to tensors, text in chunk
#: files, Parquet and Arrow, a billion tokens, formats and their readers.
RECORDS, FIGURE_RECORDS, FILES_RECORDS = "cpu_batching", "cpu_padding", "cpu_files"
TEXT_FILES_RECORDS, LARGE_RECORDS, READERS_RECORDS = "cpu_text_files", "cpu_large_corpus", "cpu_readers"
PADDING, PLANNED, RESUMED = "padding", "planned", "resumed"
INFINIBATCH, PLANNER, SAMPLER, STREAM = "infinibatch", "BatchPlanner.plan", "LengthBatchSampler", "LengthBatchStream"
STAGES = ("read", "plan", "encode", "pad")
OURS, PACKED = "BatchPlanner", "packed"
ORDERS, CACHES = ("file order", "shuffled"), ("cold", "warm")

Lines = list[dict[str, Any]]


def text_files_table(lines: Lines) -> str:
    """The size of each format beside that of the text, and items a second of CPU time in each order."""
    rows = []
    for line in lines:
        speed = line["items"] / line["seconds"] / 1e3
        spread = speed * line["iqr"] / line["seconds"] / 2
        size = f"{line['bytes'] / line['text_bytes']:.0%}"
        rows.append([line["format"], size, line["order"], f"{speed:.0f} (± {spread:.0f})"])
    return markdown(["format", "size / text", "order", "1,000 items/s"], rows)


def files_table(lines: Lines) -> str:
    """Seconds, and the share of each stage in the CPU time."""
    rows = []
    for line in lines:
        stages = line["stages"]
        shares = [f"{stages[stage] / sum(stages.values()):.0%}" for stage in STAGES]
        times = (line[name] for name in ("cpu_seconds", "cpu_iqr", "wall_seconds", "wall_iqr"))
        rows.append([line["implementation"], *(f"{time:.3g}" for time in times), *shares])
    return markdown(["implementation", "CPU s", "IQR", "wall s", "IQR", *STAGES], rows)


def large_corpus_table(lines: Lines) -> str:
    header = ["", "cache", "time", "IQR", "peak memory (RSS)", "anonymous at the end"]
    rows = [
        [
            line["what"],
            line["cache"],
            _time(line["seconds"]),
            _time(line["iqr"]) if line["repeats"] > 1 else "",
            f"{line['figures']['peak_megabytes']:.0f} MB",
            f"{line['figures']['anonymous_megabytes']:.0f} MB",
        ]
        for line in lines
    ]
    return markdown(header, rows)


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def readers_table(lines: Lines) -> str:
    """A row for each reader: million tokens a second, with half the interquartile range, and items a second."""
    speeds: dict[tuple[str, str, str], dict[tuple[str, str], str]] = {}
    for line in lines:
        reader = speeds.setdefault((line["format"], line["reader"], line["version"]), {})
        speed = line["tokens"] / line["seconds"] / 1e6
        spread = speed * line["iqr"] / line["seconds"] / 2
        items = 1e3 * round(line["items"] / line["seconds"] / 1e3)
        reader[line["order"], line["cache"]] = f"{speed:.3g} M (± {spread:.2g}), {items:,.0f}"
    cases = [(order, cache) for order in ORDERS for cache in CACHES]
    rows = [
        [each, f"{reader} ({library})" if library else f"`{reader}`", *(found[case] for case in cases)]
        for (each, reader, library), found in speeds.items()
    ]
    return markdown(["format", "reader", *(f"{order}, {cache}" for order, cache in cases)], rows)


def padding_table(lines: Lines) -> str:
    """Of the file with one line, which the figure shows."""
    rows = [[way["name"], f"{way['batches']:,}", f"{way['padding']:.1%}"] for way in lines[0]["ways"]]
    return markdown(["batching", "batches", "padding"], rows)


def histograms_figure(lines: Lines) -> Figure:
    return padding_figure(lines[0])
