import pytest

from seqwarm_kernels.demo.text import TextFile, read_corpus, split, standard_library


def as_bytes(part):
    return bytes(part.tolist())


def test_standard_library_is_split_by_file_at_ten_per_cent():
    names = [file.name for file in standard_library()]
    assert "argparse.py" in names
    assert len(names) == len(set(names)) > 300
    assert not any("site-packages" in name or name.startswith(("test/", "lib2to3/")) for name in names)
    corpus = read_corpus(None, 64)
    training, validation = (as_bytes(part).split(b"\0") for part in (corpus.training, corpus.validation))
    assert set(training).isdisjoint(validation)
    assert 0.08 < len(corpus.validation) / (len(corpus.training) + len(corpus.validation)) <= 0.1


def test_the_split_depends_on_names_and_not_on_the_order():
    files = [TextFile(f"{index}.txt", f"text of file {index}\n".encode()) for index in range(40)]
    training, validation = split(files)
    assert split(files[::-1]) == (training, validation)
    parts = training.split(b"\0"), validation.split(b"\0")
    assert sorted(parts[0] + parts[1]) == sorted(file.content for file in files)


def test_few_files():
    large, small = TextFile("a", b"a" * 100), TextFile("b", b"b" * 50)
    assert split([large, small]) == (large.content, small.content)
    twin = TextFile("c", large.content)  # used once, so that both parts differ
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


def test_the_fingerprint_differs_between_texts(tmp_path):
    prints = set()
    for content in ("abc" * 100, "abd" * 100):
        (tmp_path / "text").write_text(content)
        prints.add(read_corpus((str(tmp_path),), 16).fingerprint())
    assert len(prints) == 2
    assert read_corpus((str(tmp_path / "text"),), 16).fingerprint() in prints
