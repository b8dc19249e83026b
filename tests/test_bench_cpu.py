"""bench: CPU benchmarks measure and make their tables, in tiny sizes."""

import json
from dataclasses import asdict, replace

import pytest
import torch

from bench import page
from bench.alibi_attention import cpu as attention
from bench.alibi_attention import decoding, peers, short
from bench.alibi_attention.cases import BOTH, FORWARD
from bench.alibi_attention.problems import Problem
from bench.alibi_attention.report import RECORDS as ATTENTION
from bench.batching import cpu as batching
from bench.batching import files, large_corpus, readers
from bench.batching.corpora import BenchCorpus
from bench.batching.report import files_table, large_corpus_table, readers_table
from bench.batching.token_corpus import document_lengths, write_flat
from bench.moment_statistics import cpu as diagnostics
from bench.report import REPORTS
from bench.resize_batch import cpu as resizing
from bench.resize_batch.implementations import BY_HAND, METHODS, OURS, Resizing, implementations
from bench.resize_batch.report import RECORDS as RESIZING

CPU = torch.device("cpu")


def page_of(table, name, rows, monkeypatch, tmp_path):
    """The table that a page of docs would show of these records."""
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    lines = [{"cpu": "a CPU"}, *map(asdict, rows)]
    (tmp_path / f"{name}_kind.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return page._of_cpus(name, table)()


def test_short_attention_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(short, "problem_of", lambda length, dtype: Problem(2, 2, 2, length, 16, dtype=dtype))
    rows = list(short.measure(8, torch.float32, "tokens first", 1, 0.001))
    assert [record.facts["work"] for record in rows] == [FORWARD] * 4 + [BOTH] * 4
    assert rows[0].implementation == "alibi_attention native"
    assert rows[0].max_error < 1e-5
    rows += [replace(record, facts={**record.facts, "dtype": "torch.bfloat16"}) for record in rows]
    text = page_of(page._short_table, "cpu_short_attention", rows, monkeypatch, tmp_path)
    assert text.startswith("a CPU, kind:\n\n| tokens | float32, forward |")
    assert "\n| 8 | " in text


def test_decoding_is_measured(monkeypatch, tmp_path):
    rows = [row for inputs in "ab" for row in decoding.measure(Problem(1, 4, 2, 1024, 16), inputs, 1, 0.001)]
    assert [row.implementation for row in rows[:3]] == [peers.OURS, decoding.OURS_BOUND, peers.OURS_NO_SKIP]
    assert all(row.max_error < 0.02 for row in rows if row.implementation != peers.FLASH.name)
    text = page_of(page._decoding_table, "cpu_decoding", rows, monkeypatch, tmp_path)
    assert text.startswith("a CPU, kind:\n\n| heads, head_dim | rows | keys | SDPA mask |")


def test_attention_is_measured(monkeypatch):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    problem = Problem(2, 2, 2, 32, 64, dtype=torch.float32)
    monkeypatch.setattr(attention, "LONG", problem)
    found = attention.measure(problem, "a", [*peers.ours(CPU, problem.dtype), peers.MASK], 1, 0.001)
    assert [record.facts["work"] for record in found] == [FORWARD] * 3 + [BOTH] * 3
    assert "peak_megabytes" in found[0].facts
    assert max(record.max_error for record in found[:3]) < 1e-4, "peers compute the same"
    text = REPORTS[ATTENTION].table(found)
    assert "| forward, causal B2 H2 S32 D64, float32 | SDPA with bias mask | 1 |" in text


def test_resizing_is_measured():
    threads, records = torch.get_num_threads(), []
    try:
        for method in METHODS:
            problem = Resizing(3, 4, 16, 6, method)
            names = list(implementations(problem, problem.batch("meta"), compiled=False))
            found = resizing._measure_in_process((problem, names, 1, 0.001))
            assert [record.implementation for record in found] == names
            assert {OURS, BY_HAND} <= set(names)
            records += found
    finally:
        torch.set_num_threads(threads)
    text = REPORTS[RESIZING].table(records)
    assert all(f"| {method}, 3 x 4 x 16 int64 to 6 | {OURS} | 1 |" in text for method in METHODS)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{'word ' * (index % 23 + 1)}\n" for index in range(1000)))
    return BenchCorpus("a corpus", [path], "line")


def test_batching_is_measured(monkeypatch, corpus):
    for name, value in (("MILLION", 500), ("WINDOW", 100), ("BUDGET", 256), ("TOKENIZERS", ("whitespace", "bytes"))):
        monkeypatch.setattr(batching, name, value)
    lines = list(batching.run([corpus], repeats=2))
    shown = batching.figure_histograms(corpus)
    assert (shown["items"], shown["token_kind"]) == (1000, "bytes")
    assert all(sum(way["tokens_of_a_batch"]["counts"]) == way["batches"] for way in shown["ways"])
    random = next(line for line in lines if (line["implementation"], line["counted"]) == ("random batches", "bytes"))
    assert shown["ways"][0]["padding"] == random["figures"]["padding"]
    assert {line["what"] for line in lines} == {"padding", "planned", "resumed"}


def test_files_to_tensors_are_measured(monkeypatch, corpus, tmp_path):
    monkeypatch.setattr(files, "WINDOW", 100)
    corpus.write_chunks(tmp_path / "chunks", most_bytes=256)
    ours = next(files.measure(corpus, tmp_path / "chunks", windows=3, repeats=2))
    shown = [ours[name] for name in ("implementation", "items", "batches", "repeats")]
    assert shown == ["LengthBatchStream", 300, 3, 2]
    assert all(0 < seconds <= ours["cpu_seconds"] for seconds in ours["stages"].values())
    assert f"| LengthBatchStream | {ours['cpu_seconds']:.3g} |" in files_table([ours])


@pytest.mark.slow
def test_diagnostics_large_corpora_and_readers_are_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(diagnostics, "MODEL", (1, 1, 8))
    monkeypatch.setattr(large_corpus, "BUDGET", 256)
    monkeypatch.setattr(large_corpus, "in_process", lambda function, *given: large_corpus._measured(function, given))
    tokens = 100_000
    path = write_flat(tmp_path / "train.bin", document_lengths(tokens))
    for table in (
        diagnostics.share_table(diagnostics.measure_at(length=8, repeats=1)),
        large_corpus_table(list(large_corpus.measure(path, tokens, repeats=1))),
        readers_table(list(readers.measure(tokens=20_000, repeats=1))),
    ):
        assert table.count("\n|") >= 3
