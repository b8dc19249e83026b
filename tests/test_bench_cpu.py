"""bench: the CPU benchmarks measure and report, in tiny sizes."""

import json
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from bench import page
from bench.alibi_attention import cpu as attention
from bench.alibi_attention import decoding, hopper, peers, short
from bench.alibi_attention.cases import BOTH, FORWARD, RESULT_NAMES, Case
from bench.alibi_attention.problems import TINY, Problem
from bench.alibi_attention.report import RECORDS as ATTENTION
from bench.batching import cpu as batching
from bench.batching import files, large_corpus, readers
from bench.batching.corpora import BenchCorpus
from bench.batching.report import files_table, large_corpus_table, readers_table
from bench.batching.token_corpus import document_lengths, write_flat
from bench.moment_statistics import cpu as moments
from bench.report import REPORTS
from bench.resize_batch import cpu as resizing
from bench.resize_batch.implementations import BY_HAND, METHODS, OURS, Resizing, implementations
from bench.resize_batch.report import RECORDS as RESIZING

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    """test_bench_figures draws."""
    monkeypatch.setattr("bench.common.figures.png", lambda draw, dark=False: b"")


@pytest.mark.parametrize(
    "problem",
    [
        Problem(2, 4, 2, 48, 16, dtype=torch.float32),
        Problem(2, 4, 2, 48, 16, causal=False, dtype=torch.float32),
        Problem(2, 2, 2, 48, 16, segment_length=12, dtype=torch.float32),
    ],
    ids=lambda problem: problem.case(),
)
def test_attention_peers_compute_the_same(problem):
    case = Case(problem, "b", CPU)
    for peer in (*peers.ours(CPU, problem.dtype), peers.reference(), peers.MASK, peers.EAGER):
        out = peer.make(problem, CPU)(*case.inputs)
        errors = case.exact.errors(out.detach(), torch.autograd.grad(out, case.inputs, case.grad_out))
        assert set(errors) == set(RESULT_NAMES)
        assert max(errors.values()) < 1e-4, peer.name


def test_flash_attention_3_has_its_own_layout(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    results = []

    def flash_attn_func(*inputs, causal):
        assert all(tensor.is_contiguous() for tensor in inputs)
        head_major = (tensor.transpose(1, 2) for tensor in inputs)
        return scaled_dot_product_attention(*head_major, is_causal=causal).transpose(1, 2)

    class PretendRecorder:
        def measure(self, stage, case, work, implementation, make, **_):
            if implementation == peers.FLASH_3.name:
                results.append(make()[0]())

    flash = SimpleNamespace(flash_attn_func=flash_attn_func, __spec__=object())
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash)
    hopper.hopper(PretendRecorder(), CPU, tiny=True)
    inputs = Case(TINY, "a", CPU).inputs
    out = scaled_dot_product_attention(*inputs, is_causal=True)
    torch.testing.assert_close(results[0], out.detach())
    assert [gradient.shape for gradient in results[1]] == [tensor.shape for tensor in inputs]


def test_short_attention_is_measured(monkeypatch, tmp_path):
    rows = list(short.measure(8, torch.float32, "tokens first", 1, 0.001))
    assert [record.facts["work"] for record in rows] == [FORWARD] * 4 + [BOTH] * 4
    assert rows[0].implementation == "alibi_attention native"
    assert rows[0].max_error < 1e-5
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    other = [
        replace(record, facts={**record.facts, "dtype": "torch.bfloat16"}, median_ms=0.5 * record.median_ms)
        for record in rows
    ]
    lines = [{"cpu": "a CPU"}, *(asdict(record) for record in rows + other)]
    (tmp_path / "cpu_short_attention_kind.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert page._short_attention().startswith("a CPU, kind:\n\n| tokens | float32, forward |")
    assert "\n| 8 | " in page._short_attention()


def test_decoding_is_measured(monkeypatch, tmp_path):
    rows = [row for inputs in "ab" for row in decoding.measure(Problem(1, 4, 2, 1024, 16), inputs, 1, 0.001)]
    assert [row.implementation for row in rows[:3]] == [peers.OURS, decoding.OURS_BOUND, peers.OURS_NO_SKIP]
    assert all(row.max_error < 0.02 for row in rows if row.implementation != peers.FLASH.name)
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    lines = [{"cpu": "a CPU"}, *(asdict(row) for row in rows)]
    (tmp_path / "cpu_decoding_kind.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert page._decoding().startswith("a CPU, kind:\n\n| heads, head_dim | rows | keys | SDPA mask |")


def test_attention_is_measured(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    problem = Problem(2, 2, 2, 32, 64, dtype=torch.float32)
    monkeypatch.setattr(attention, "LONG", problem)
    found = attention.measure(problem, "a", [*peers.ours(CPU, problem.dtype), peers.MASK], 1, 0.001)
    assert [record.facts["work"] for record in found] == [FORWARD] * 3 + [BOTH] * 3
    assert "peak_megabytes" in found[0].facts
    text = REPORTS[ATTENTION]([asdict(record) for record in found], tmp_path)
    assert "| forward, causal B2 H2 S32 D64, float32 | SDPA with bias mask | 1 |" in text
    assert (tmp_path / "cpu_attention.png").exists()


def test_resizing_is_measured(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    threads, records = torch.get_num_threads(), []
    try:
        for method in METHODS:
            problem = Resizing(3, 4, 16, 6, method)
            names = list(implementations(problem, problem.batch("meta"), compiled=False))
            found = resizing._measure_in_process(resizing.Work(problem, names, 1, 0.001))
            assert [record.implementation for record in found] == names
            assert {OURS, BY_HAND} <= set(names)
            records += found
    finally:
        torch.set_num_threads(threads)
    text = REPORTS[RESIZING]([asdict(record) for record in records], tmp_path)
    assert all(f"| {method}, 3 x 4 x 16 int64 to 6 | {OURS} | 1 |" in text for method in METHODS)
    assert (tmp_path / "cpu_resize_batch.png").exists()


def test_the_monitor_is_measured(monkeypatch):
    monkeypatch.setattr(moments, "MODEL", (1, 2, 16))
    records = moments.measure_at(8, repeats=2)
    assert [record.implementation for record in records] == [moments.STEP, moments.MONITOR, moments.BY_HAND]
    assert all(record.max_error < 1e-5 for record in records[1:])
    assert moments.share_table(records).count("\n") == 4


def test_batching_is_measured(monkeypatch, tmp_path):
    for name, value in (("MILLION", 500), ("WINDOW", 100), ("BUDGET", 256), ("TOKENIZERS", ("whitespace", "bytes"))):
        monkeypatch.setattr(batching, name, value)
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{'word ' * (index % 23 + 1)}\n" for index in range(1000)))
    lines = list(batching.run([BenchCorpus("a corpus", [path], "line")], repeats=2))
    shown = batching.figure_histograms(BenchCorpus("a corpus", [path], "line"))
    assert (shown["items"], shown["token_kind"]) == (1000, "bytes")
    assert all(sum(way["tokens_of_a_batch"]["counts"]) == way["batches"] for way in shown["ways"])
    random = next(line for line in lines if (line["implementation"], line["counted"]) == ("random batches", "bytes"))
    assert shown["ways"][0]["padding"] == random["figures"]["padding"]
    assert {line["what"] for line in lines} == {"padding", "planned", "resumed"}
    assert all(line["figures"]["batches"] > 0 for line in lines if line["what"] != "resumed")
    resumed = {line["implementation"].partition(" of")[0] for line in lines if line["what"] == "resumed"}
    assert {"LengthBatchStream", "LengthBatchSampler"} <= resumed


def test_a_large_corpus_is_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(
        large_corpus, "in_process", lambda function, *arguments: large_corpus._measured(function, arguments)
    )
    monkeypatch.setattr(large_corpus, "BUDGET", 4096)
    tokens = 2_000_000
    path = write_flat(tmp_path / "train.bin", document_lengths(tokens))
    assert path.stat().st_size == 2 * tokens
    lines = list(large_corpus.measure(path, tokens, repeats=2))
    assert [line["what"] for line in lines if line["cache"] == "warm"] == [
        *("first batch, documents not searched yet", "first batch", "plan of an epoch", "half an epoch", "resume"),
    ]
    assert lines[0]["documents"] == len(document_lengths(tokens))
    assert "\n| resume | cold | " in large_corpus_table(lines)


def test_readers_of_formats_are_measured(monkeypatch):
    with_libraries = [each for each in readers.FORMATS if each.needs is not None]
    monkeypatch.setattr(readers, "FORMATS", [each for each in readers.FORMATS if each not in with_libraries])
    lines = list(readers.measure(20_000, repeats=2))
    assert {line["reader"] for line in lines} == {"TokenSource", "numpy.memmap", "ChunkSource", "gzip and json"}
    assert len(lines) == 4 * 4
    assert all(line["seconds"] > 0 and line["tokens"] == 20_000 for line in lines)
    assert readers_table(lines).count("\n") == 1 + 4


def test_files_to_tensors_are_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(files, "WINDOW", 100)
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{'word ' * (index % 23 + 1)}\n" for index in range(1000)))
    corpus = BenchCorpus("a corpus", [path], "line")
    corpus.write_chunks(tmp_path / "chunks", most_bytes=256)
    ours = next(files.measure(corpus, tmp_path / "chunks", windows=3, repeats=2))
    shown = [ours[name] for name in ("implementation", "items", "batches", "repeats")]
    assert shown == ["LengthBatchStream", 300, 3, 2]
    assert set(ours["stages"]) == {"read", "plan", "encode", "pad"}
    assert all(0 < seconds <= ours["cpu_seconds"] for seconds in ours["stages"].values())
    assert f"| LengthBatchStream | {ours['cpu_seconds']:.3g} |" in files_table([ours])
