"""Files of text, and windows of it."""

import sysconfig
from pathlib import Path

import pytest
import torch

from seqwarm_kernels.demo.text import (
    TextFile,
    read_corpus,
    split,
    standard_library,
    training_batch,
    validation_set,
)

TEXT = torch.arange(1000, dtype=torch.int16)  # every token is its own position


def as_bytes(part):
    return bytes(part.tolist())


def test_standard_library_is_split_by_file_at_ten_per_cent(tmp_path, monkeypatch):
    assert (Path(sysconfig.get_path("stdlib")) / "argparse.py").exists()
    names = {f"folder/{number}.py" for number in range(40)}
    for name in names | {"test/a.py", "lib2to3/b.py", "site-packages/deep/c.py", "d.txt"}:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"the text of {name}\n" * 20)
    monkeypatch.setattr(sysconfig, "get_path", {"stdlib": tmp_path}.__getitem__)
    assert {file.name for file in standard_library()} == names
    corpus = read_corpus(None, 64)
    training, validation = (as_bytes(part).split(b"\0") for part in (corpus.training, corpus.validation))
    assert set(training).isdisjoint(validation)
    assert 0.08 < len(corpus.validation) / (len(corpus.training) + len(corpus.validation)) <= 0.1


def test_the_split_depends_on_names_and_not_on_the_order():
    files = [TextFile(f"{index}.txt", f"text of file {index}\n".encode()) for index in range(40)]
    training, validation = split(files)
    assert split(files[::-1]) == (training, validation)
    assert sorted((training + b"\0" + validation).split(b"\0")) == sorted(file.content for file in files)


def test_a_file_is_used_once_and_a_single_one_is_split():
    large, small = TextFile("a", b"a" * 100), TextFile("b", b"b" * 50)
    twin = TextFile("c", large.content)
    assert split([large, twin, small]) == (large.content, small.content)
    assert split([large]) == (b"a" * 90, b"a" * 10)


def test_folders_are_read_recursively_without_hidden_files(tmp_path):
    for name, letter in (("a.txt", "a"), ("deep/er/b.txt", "b"), (".hidden", "c"), (".git/d.txt", "d")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(letter * 100)
    corpus = read_corpus((str(tmp_path), str(tmp_path / "a.txt")), 16)  # a.txt is used once
    assert sorted(as_bytes(corpus.training) + as_bytes(corpus.validation)) == sorted(b"a" * 100 + b"b" * 100)


@pytest.mark.parametrize("content", [b"good \xff bad", b"", b"x" * 500])
def test_text_that_cannot_be_trained_on_is_named(tmp_path, content):
    path = tmp_path / "own.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"own\.txt"):
        read_corpus((str(path),), 64)  # more than the 50 bytes of validation


def test_the_fingerprint_is_of_the_text(tmp_path):
    one, same, other = (tmp_path / name for name in ("one", "same", "other"))
    for path, content in ((one, "abc"), (same, "abc"), (other, "abd")):
        path.write_text(content * 100)
    prints = [read_corpus((str(path),), 16).fingerprint() for path in (one, same, other)]
    assert prints[0] == prints[1] != prints[2]


def test_a_batch_depends_only_on_seed_and_step():
    batch = training_batch(TEXT, seed=3, step=7, batch_size=4, seq_length=16)
    before = torch.get_rng_state()
    again = training_batch(TEXT, seed=3, step=7, batch_size=4, seq_length=16)
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(batch[name], again[name]) for name in batch)
    for seed, step in ((3, 8), (4, 7)):
        other = training_batch(TEXT, seed, step, batch_size=4, seq_length=16)
        assert not torch.equal(batch["input_ids"], other["input_ids"])


def test_label_is_the_next_token():
    batch = training_batch(TEXT, seed=0, step=0, batch_size=64, seq_length=990)
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert batch["input_ids"].min() == 0  # the first and the last window are drawn
    assert batch["labels"].max() == 999


def test_validation_windows_cover_the_text_without_overlap():
    for count, expected in ((5, 5), (1000, 62)):
        batch = validation_set(TEXT, count, seq_length=16)
        starts = batch["input_ids"][:, 0]
        assert len(starts) == expected
        assert (starts.diff() >= 16).all()
        assert (starts[0], batch["labels"][-1, -1]) == (0, 999)
