"""Commands of bench that no other test runs measure a tiny case, and make a table of it."""

import pytest

from bench.batching import large_corpus, readers
from bench.batching.report import large_corpus_table, readers_table
from bench.batching.token_corpus import document_lengths, write_flat
from bench.moment_statistics import cpu as diagnostics

pytestmark = pytest.mark.slow


def of_diagnostics(folder, monkeypatch):
    monkeypatch.setattr(diagnostics, "MODEL", (1, 1, 8))
    return diagnostics.share_table(diagnostics.measure_at(length=8, repeats=1))


def of_large_corpus(folder, monkeypatch):
    monkeypatch.setattr(large_corpus, "BUDGET", 256)
    monkeypatch.setattr(large_corpus, "in_process", lambda function, *given: large_corpus._measured(function, given))
    tokens = 100_000
    path = write_flat(folder / "train.bin", document_lengths(tokens))
    return large_corpus_table(list(large_corpus.measure(path, tokens, repeats=1)))


def of_readers(folder, monkeypatch):
    return readers_table(list(readers.measure(tokens=20_000, repeats=1)))


@pytest.mark.parametrize("command", [of_diagnostics, of_large_corpus, of_readers])
def test_a_tiny_run(command, tmp_path, monkeypatch):
    assert command(tmp_path, monkeypatch).count("\n|") >= 3
