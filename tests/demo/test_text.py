import sysconfig
from pathlib import Path

import pytest

from seqwarm_kernels.demo.text import TextFile, read_corpus, split, standard_library


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
