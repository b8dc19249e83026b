"""Writes the tables of pages of docs from the records under bench/results."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from experiments.stability import tables as stability
from experiments.stability.command import RECORDS as STABILITY

from .alibi_attention import hopper
from .alibi_attention.cases import BACKWARD, BOTH, FORWARD
from .alibi_attention.decoding import OURS_BOUND
from .alibi_attention.figures import is_plain
from .alibi_attention.peers import CUDNN, CUDNN_MASK, EAGER, FLASH, FLASH_3, FLEX, MASK, OURS, OURS_NO_SKIP
from .alibi_attention.report import DECODING, SEGMENTS, SHORT, by_dtype_and_work, find
from .alibi_attention.segments import segments_table
from .batching.report import LARGE_RECORDS, PADDING, READERS_RECORDS, large_corpus_table, readers_table
from .batching.report import RECORDS as BATCHING
from .common.records import RESULTS, ROOT, CpuRecord, markdown, read
from .gpu.records import DeviceRecord, DeviceRecords, read_folder, speedup, teraflops
from .parallel import report as many_devices

_DOCS = ROOT / "docs"
LENGTHS = (64, 256, 1024, 4096, 8192, 16384)
#: Layout of the rows of short calls that the page shows: as projections return them.
TOKENS_FIRST = "tokens first"
#: Lengths of the caches that the page shows.
DECODED_KEYS = (1024, 16384)


def main(arguments: argparse.Namespace) -> None:
    for page, tables in PAGES.items():
        page.write_text(filled(page.read_text(), tables))


def filled(page: str, tables: dict[str, Callable[[], str]]) -> str:
    """The page with new tables between `<!-- name: begin -->` and `<!-- name: end -->`."""
    for name, make in tables.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{make()}\n\n{end}{rest.split(end)[1]}"
    return page


def _cpu_records(name: str) -> list[CpuRecord]:
    return [CpuRecord(**line) for line in read(RESULTS / f"{name}.jsonl")[1]]


def _time_text(time: float | None) -> str:
    if time is None:
        return ""
    return f"{time:.3g} ms" if time >= 0.1 else f"{1000 * time:.3g} µs"


def _times_as_fast(ours: float | None, theirs: float | None) -> str:
    return f"{theirs / ours:.1f}" if ours and theirs else ""


# ---- attention


def _attention_time(records: list[CpuRecord], implementation: str, length: int, dtype: str, work: str) -> float | None:
    """The time of a causal call with 12 heads of 64."""
    facts: dict[str, Any] = {"causal": True, "segment_length": None, "inputs": "a", "heads": 12, "head_dim": 64}
    found = find(records, implementation, length=length, dtype=f"torch.{dtype}", work=work, key_heads=12, **facts)
    return None if found is None else found.median_ms


def _attention_peers() -> str:
    records = _cpu_records("cpu_alibi_attention")
    names = {
        "**`alibi_attention`**": OURS,
        "`alibi_attention`, `skip_tolerance=0`": OURS_NO_SKIP,
        "SDPA with the dense bias as mask": MASK.name,
        "FlexAttention, compiled (no backward on CPUs)": FLEX.name,
        "SDPA without any bias": FLASH.name,
        "eager with a dense bias": EAGER.name,
    }

    def cell(name: str, dtype: str, work: str) -> str:
        return _time_text(_attention_time(records, name, 1024, dtype, work))

    return by_dtype_and_work("2 rows of 1,024 tokens", names, cell)


def _attention_lengths() -> str:
    records = _cpu_records("cpu_alibi_attention")
    rows = []
    for dtype in ("float32", "bfloat16"):
        for length in LENGTHS:
            row = [f"{length:,}", dtype]
            for work, peers in ((FORWARD, (MASK, EAGER, FLEX, FLASH)), (BOTH, (MASK, EAGER, FLASH))):
                ours = _attention_time(records, OURS, length, dtype, work)
                row.append(_time_text(ours))
                row += [
                    _times_as_fast(ours, _attention_time(records, peer.name, length, dtype, work)) for peer in peers
                ]
            if row[2]:
                rows.append(row)
    header = ["tokens", "dtype", "forward", "SDPA mask", "eager", "Flex", "SDPA, no bias"]
    return markdown([*header, "with backward", "SDPA mask", "eager", "SDPA, no bias"], rows)


def _of_cpus(name: str, table: Callable[[list[CpuRecord]], str]) -> Callable[[], str]:
    """A table for each CPU with records of this name."""

    def make() -> str:
        texts = []
        for path in sorted(RESULTS.glob(f"{name}_*.jsonl")):
            environment, lines = read(path)
            body = table([CpuRecord(**line) for line in lines])
            texts.append(f"{environment['cpu']}, {path.stem.removeprefix(f'{name}_')}:\n\n{body}")
        return "\n\n".join(texts)

    return make


def _short_table(records: list[CpuRecord]) -> str:
    """How many times as fast as the best peer with the bias, and as the best of all."""
    names = ("length", "layout", "dtype", "work")
    times = {(*(r.facts[name] for name in names), r.implementation): r.median_ms for r in records}

    def cell(length: int, dtype: str, work: str) -> str:
        ours, mask, eager, no_bias = (
            times[length, TOKENS_FIRST, f"torch.{dtype}", work, name]
            for name in (f"{OURS} native", MASK.name, EAGER.name, FLASH.name)
        )
        ratios = _times_as_fast(ours, min(mask, eager)), _times_as_fast(ours, min(mask, eager, no_bias))
        return f"{_time_text(ours)} ({', '.join(ratios)})"

    return by_dtype_and_work("tokens", {length: length for length, *_ in times}, cell)


def _decoding_table(records: list[CpuRecord]) -> str:
    """Times, and how many times as fast as SDPA with a mask that was made before."""
    names = ("heads", "key_heads", "head_dim", "batch_size", "length")
    times: dict[tuple[int, ...], dict[tuple[str, str], float]] = {}
    for record in records:
        case = times.setdefault(tuple(record.facts[name] for name in names), {})
        case[record.implementation, record.facts["inputs"]] = record.median_ms
    rows = []
    for (heads, key_heads, head_dim, batch_size, keys), found in times.items():
        if keys in DECODED_KEYS:
            case_text = [f"{heads} on {key_heads}, {head_dim}", f"{batch_size}", f"{keys:,}"]
            ratios = [
                _times_as_fast(found[name, inputs], found[MASK.name, inputs])
                for name in (OURS, OURS_BOUND, OURS_NO_SKIP)
                for inputs in "ab"
            ]
            rows.append([*case_text, _time_text(found[MASK.name, "a"]), *ratios])
    header = ["heads, head_dim", "rows", "keys", "SDPA mask", "ours", "inputs b", "with bound", "inputs b"]
    return markdown([*header, "no skip", "inputs b"], rows)


# ---- on a GPU

#: Columns of peers. The last one computes without a bias.
_GPU_PEERS = (FLEX.name, CUDNN_MASK.name, EAGER.name, CUDNN.name)


def _gpu_attention() -> str:
    """A row for each length and pass: ours in milliseconds, and how many times as fast as each peer."""
    environments, records = read_folder(RESULTS)
    attention = records.of_stages("long", "lengths")
    rows = [_gpu_row(attention, record) for work in (FORWARD, BOTH) for record in _gpu_records(attention, work)]
    header = ["pass", "rows x tokens", "heads, head_dim", "ms", "no skip, ms", "Flex", "cuDNN, mask", "eager"]
    gpu = next(environment for name, environment in environments.items() if "attention" in name)
    facts = f"{gpu['gpu']}, torch {gpu['torch']}, Triton {gpu['triton']}, cuDNN {gpu['nvidia-cudnn-cu13']}"
    return f"{facts}:\n\n{markdown([*header, 'cuDNN, no bias'], rows)}"


def _gpu_records(records: DeviceRecords, work: str) -> list[DeviceRecord]:
    found = [record for record in records.timed(OURS, work) if is_plain(record)]
    return sorted(found, key=lambda record: (record.facts["head_dim"], record.facts["length"]))


def _gpu_row(records: DeviceRecords, record: DeviceRecord) -> list[str]:
    names = ("batch_size", "length", "heads", "head_dim")
    batch_size, length, heads, head_dim = (record.facts[name] for name in names)
    no_skip = records.beside(record, OURS_NO_SKIP)
    cells = [record.work, f"{batch_size:,} x {length:,}", f"{heads}, {head_dim}", f"{record.median_ms:.3g}"]
    cells.append(f"{no_skip.median_ms:.3g}" if no_skip else "")
    ratios = [speedup(record, records.beside(record, name)) for name in _GPU_PEERS]
    return [*cells, *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios)]


def _hopper() -> str:
    """A row for each kind of call: the Gluon kernels' time and rate, and how many times as fast they are as others."""
    records = read_folder(RESULTS)[1]
    found = records.of_stages(hopper.STAGE)
    kinds = {
        (facts["head_dim"], not facts["causal"], facts["skipping"], facts["length"]): facts
        for facts in (record.facts for record in found.timed(hopper.GLUON, FORWARD))
    }
    rows = []
    for head_dim, full, skipping, length in sorted(kinds, key=lambda kind: (-kind[0], *kind[1:])):
        keys = f"{'full, ' if full else ''}{'skipping' if skipping else 'all'}"
        row = [f"{head_dim}", keys, f"{length:,}"]
        for work in (FORWARD, BACKWARD):
            record = next(found.timed(hopper.GLUON, work, **kinds[head_dim, full, skipping, length]))
            peers = [found.beside(record, name) for name in (hopper.TRITON, CUDNN.name, FLASH_3.name)]
            ratios = [speedup(record, peer) for peer in peers]
            time = f"{1e3 * (record.median_ms or 0):,.0f}"
            row.append(time if skipping else f"{time} ({teraflops(record):.0f})")
            row += ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        rows.append(row)
    columns = [name for work in (FORWARD, BACKWARD) for name in (f"{work}, µs", "Triton", "cuDNN", "flash-attn-3")]
    return markdown(["head_dim", "keys", "tokens", *columns], rows)


# ---- everything else


def _padding_table(lines: list[dict[str, Any]]) -> str:
    """A row for each rule, a column for each way to count tokens."""
    shares: dict[str, dict[str, str]] = {}
    for line in lines:
        if line["what"] == PADDING and line["counted"] != "bytes":
            row = shares.setdefault(line["implementation"], {})
            row[f"{line['corpus']}, {line['counted']}"] = f"{line['figures']['padding']:.1%}"
    columns = dict.fromkeys(name for row in shares.values() for name in row)
    rows = [[name, *(row.get(column, "") for column in columns)] for name, row in shares.items()]
    return markdown(["batches", *columns], rows)


def _demo_table(lines: list[dict[str, Any]]) -> str:
    rows = []
    for line in lines:
        row = [line["seed"], line["version"], line.get("attention", "not recorded"), line["learning_rate"]]
        row.append(f"{line['baseline_loss']:.3f}")
        if "warmup_loss" in line:
            seconds = line["baseline_seconds"] / line["reached_after_seconds"]
            tokens = line["tokens"] / line["reached_after_tokens"]
            rows.append([*row, f"{line['warmup_loss']:.3f}", f"{seconds:.2f}", f"{tokens:.2f}"])
        else:
            rows.append([*row, "not run", "", ""])
    header = ["seed", "version", "attention", "learning rate", "loss, full length", "loss, warmup"]
    return markdown([*header, "sooner in seconds", "sooner in tokens"], rows)


def _of_lines(name: str, table: Callable[[list[dict[str, Any]]], str]) -> Callable[[], str]:
    return lambda: table(read(RESULTS / f"{name}.jsonl")[1])


def _of_sources(name: str, table: Callable[[list[dict[str, Any]]], str]) -> Callable[[], str]:
    def make() -> str:
        environment, lines = read(RESULTS / f"{name}.jsonl")
        return f"{table(lines)}\n\n{environment['cpu']}, {lines[0]['conditions']}, Python {environment['python']}."

    return make


#: The tables of each page, by the names of their markers.
PAGES = {
    _DOCS / "benchmarks" / "index.md": {
        "attention beside its peers": _attention_peers,
        "attention over lengths": _attention_lengths,
        "short attention": _of_cpus(SHORT, _short_table),
        "segments": _of_cpus(SEGMENTS, segments_table),
        "decoding": _of_cpus(DECODING, _decoding_table),
        "attention on a GPU": _gpu_attention,
        "demo": _of_lines("cpu_demo", _demo_table),
    },
    _DOCS / "benchmarks" / "stability.md": {
        name: _of_lines(STABILITY, table) for name, table in stability.TABLES.items()
    },
    _DOCS / "kernels" / "attention_gpu.md": {"Hopper": _hopper},
    _DOCS / "benchmarks" / "data.md": {
        "padding": _of_lines(BATCHING, _padding_table),
        "readers": _of_sources(READERS_RECORDS, readers_table),
        "large corpus": _of_sources(LARGE_RECORDS, large_corpus_table),
    },
    _DOCS / "benchmarks" / "many_devices.md": {
        "exchanges": _of_lines(many_devices.RECORDS, many_devices.exchange_table),
        "widths": _of_lines(many_devices.RECORDS, many_devices.width_table),
        "balance": _of_lines(many_devices.RECORDS, many_devices.balance_table),
    },
}
