"""Files of texts and JSON lines, compressed or not: damaged ones are named, with the line."""

import gzip
import pickle

import pytest

from seqwarm_kernels.data.files import compression
from seqwarm_kernels.data.files.reader import ChunkError, iter_lines, read_chunk

COMPRESSIONS = ["gz", "zst"]

LINES = b"".join(
    b'"item %d of a file long enough to be truncated, %d"\n' % (number, number**5) for number in range(2000)
)


def compressed(kind, content=LINES):
    if kind == "zst" and compression.zstd is None:
        pytest.skip("backports.zstd is not installed")
    return compression.compress(content, kind)


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_a_damaged_file(tmp_path, kind):
    """Cut, without bytes (unlike a compressed file of nothing), or with another bit or letter."""
    path, content = tmp_path / f"a.jsonl.{kind}", compressed(kind)
    middle, letters = len(content) // 2, compressed(kind, b"letters\n")
    cut = [content[: int(len(content) * share)] for share in (0.1, 0.5, 0.999)]
    changed = [content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]]
    changed += [letters.replace(b"letters", b"lettera")] if kind == "zst" else []  # which its checksum finds
    for damaged in (*cut, *changed, b""):
        path.write_bytes(damaged)
        for read in (read_chunk, lambda path: list(iter_lines(path))) if damaged in cut else (read_chunk,):
            with pytest.raises(ChunkError, match=f"{path}: the compressed file is damaged: "):
                read(path)
        with pytest.raises(OSError, match="the compressed file is damaged: "):
            compression.read_uncompressed(path)
    path.write_bytes(compressed(kind, b""))
    assert compression.read_uncompressed(path) == b""
    with pytest.raises(ChunkError, match="the file is empty"):
        read_chunk(path)


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_the_same_content_gives_the_same_bytes(kind, monkeypatch):
    first = compressed(kind)
    monkeypatch.setattr("time.time", lambda: 0)
    assert compressed(kind) == first


@pytest.mark.parametrize("kind", COMPRESSIONS)
def test_concatenated_compressed_files(tmp_path, kind):
    """The tools of gzip and zstd write such files when they append."""
    path = tmp_path / f"a.jsonl.{kind}"
    path.write_bytes(compressed(kind) * 2)
    assert len(read_chunk(path)) == 4000


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("a.txt", None, None),
        ("a.txt", b"", None),
        ("a.txt", b"\n  \n\n", None),
        ("a.jsonl", b'{"a": 1}\n\n{"a": \n', 3),
        *(("a.jsonl", f"1\n{line}\n3]\n".encode(), 2) for line in ("1 2", "[1", "1, 2", "\ufeff1", "NaN1")),
        ("a.jsonl", b"1\n" + b"[" * 100_000 + b"\n", 2),
        ("a.txt", b"good\nbad \xff\n", 2),
        ("a.txt.gz", b"not gzip at all", None),
    ],
)
def test_invalid_files(tmp_path, name, content, line):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ChunkError) as caught:
        read_chunk(path)
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert (error.path, error.line) == (path, line)
        assert str(error).startswith(str(path) if line is None else f"{path}, line {line}: ")


@pytest.mark.parametrize(
    ("name", "content", "items"),
    [
        ("a.txt", b"1\r\n\r\n2\r\n", ["1\r", "2\r"]),
        ("a.jsonl", b"1\r\n\r\n2\r\n", [1, 2]),
        ("a.jsonl", b' {"a": 1}\n\t[2]  \n\r3\r\n4 \t\r\n', [{"a": 1}, [2], 3, 4]),
        ("A.JSONL.GZ", gzip.compress(b"[1]\n", mtime=0), [[1]]),
    ],
)
def test_what_is_an_item(tmp_path, name, content, items):
    (tmp_path / name).write_bytes(content)
    assert read_chunk(tmp_path / name) == items


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "content", "items"), [("a.txt", b"a\nb\n", ["a", "b"]), ("a.jsonl", b"1\n2\n", [1, 2])]
)
def test_a_byte_order_mark_is_not_part_of_an_item(tmp_path, name, content, items, ending):
    path = tmp_path / (name + ending)
    content = b"\xef\xbb\xbf" + content
    path.write_bytes(gzip.compress(content) if ending else content)
    assert read_chunk(path) == items
    assert next(iter_lines(path)) == (1, str(items[0]))
    path.write_bytes(path.read_bytes()[:-9] if ending else content + b"\xff")
    with pytest.raises(ChunkError, match=r"damaged|line 3: "):
        read_chunk(path)


@pytest.mark.parametrize("name", ["a.json", "a.txt.bz2", "a", "a.txt.partial", "a.gz"])
def test_other_suffixes_are_rejected(tmp_path, name):
    (tmp_path / name).write_text("a\n")
    with pytest.raises(ValueError, match=f"paths .* got .*{name}"):
        read_chunk(tmp_path / name)


def test_a_file_that_differs_from_its_manifest(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\nthr")
    for facts in ((4,), (2,), (3, 14)):
        with pytest.raises(ChunkError, match=str(path)):
            read_chunk(path, *facts)
