import pytest

from seqwarm_kernels.demo.text import TextFile, read_corpus, split, standard_library


def as_bytes(part):
    return bytes(part.tolist())


def test_standard_library_is_source_without_tests_and_packages():
    files = standard_library()
    names = [file.name for file in files]
    assert "argparse.py" in names
    assert len(names) == len(set(names)) > 300
    assert not any("site-packages" in name or name.startswith(("test/", "lib2to3/")) for name in names)


def test_standard_library_is_split_by_file_at_ten_per_cent():
    corpus = read_corpus((), 64)
    training, validation = (as_bytes(part).split(b"\0") for part in (corpus.training, corpus.validation))
    assert set(training).isdisjoint(validation)
    assert 0.08 < len(corpus.validation) / (len(corpus.training) + len(corpus.validation)) <= 0.1


def test_the_split_depends_on_names_and_not_on_the_order():
    files = [TextFile(f"{index}.txt", f"text of file {index}\n".encode()) for index in range(40)]
    training, validation = split(files)
    assert split(files[::-1]) == (training, validation)
    parts = training.split(b"\0"), validation.split(b"\0")
    assert sorted(parts[0] + parts[1]) == sorted(file.content for file in files)


def test_two_files_give_one_to_each_part():
    large, small = TextFile("a", b"a" * 100), TextFile("b", b"b" * 50)
    assert split([large, small]) == (large.content, small.content)


def test_equal_files_are_used_once():
    twins = [TextFile("a", b"same" * 9), TextFile("b", b"same" * 9)]
    assert split([*twins, TextFile("c", b"other")]) == (b"same" * 9, b"other")


def test_single_file_is_split_by_position(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(32, 127)) * 10 + b"\n" * 50)
    corpus = read_corpus((str(path),), 16)
    assert as_bytes(corpus.training) + as_bytes(corpus.validation) == path.read_bytes()
    assert len(corpus.validation) == 100


def test_folders_are_read_recursively_without_hidden_files(tmp_path):
    for name, letter in (("a.txt", "a"), ("deep/er/b.txt", "b"), (".hidden", "c"), (".git/d.txt", "d")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(letter * 100)
    corpus = read_corpus((str(tmp_path), str(tmp_path / "a.txt")), 16)  # a.txt is used once
    assert sorted(as_bytes(corpus.training) + as_bytes(corpus.validation)) == sorted(b"a" * 100 + b"b" * 100)


def test_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "a.txt").symlink_to("nowhere")
    with pytest.raises(FileNotFoundError, match=r"a\.txt"):
        read_corpus((str(tmp_path),), 16)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no such file or folder: .*nowhere\.txt"):
        read_corpus((str(tmp_path / "nowhere.txt"),), 16)


@pytest.mark.parametrize(("content", "offset"), [(b"good \xff bad", 5), (b"a picture\0", 9)])
def test_bytes_that_are_not_text_are_named_with_their_offset(tmp_path, content, offset):
    path = tmp_path / "broken.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"broken\.txt is not UTF-8 text: invalid at byte {offset}"):
        read_corpus((str(tmp_path),), 16)


@pytest.mark.parametrize("content", [b"", b" \n\n "])
def test_empty_text_is_named(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"there is no text in .*empty\.txt"):
        read_corpus((str(path),), 16)


def test_too_little_text_names_the_needed_size(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 500)
    with pytest.raises(ValueError, match=r"short\.txt: 50 bytes for validation.* 64 needs at least 65"):
        read_corpus((str(path),), 64)


def test_the_fingerprint_differs_between_texts(tmp_path):
    prints = set()
    for name, content in (("a", "abc" * 100), ("b", "abd" * 100)):
        (tmp_path / name).write_text(content)
        prints.add(read_corpus((str(tmp_path / name),), 16).fingerprint())
    assert len(prints) == 2
    assert read_corpus((str(tmp_path / "a"),), 16).fingerprint() in prints
