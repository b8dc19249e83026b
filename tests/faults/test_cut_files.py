"""A local file that is cut while it is read, or while its source is open, raises an error."""

import gzip
import os
import threading

import pytest

from seqwarm_kernels.data import ChunkError, ChunkSource
from seqwarm_kernels.data.files.reader import iter_lines
from seqwarm_kernels.data.files.remote import open_file

LINES = [f"line {number}" for number in range(100_000)]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
def test_a_local_file_that_is_cut_while_it_is_read(tmp_path, suffix):
    path = tmp_path / f"lines{suffix}"
    content = "\n".join(LINES).encode()
    path.write_bytes(gzip.compress(content) if suffix == ".txt.gz" else content)
    lines = iter_lines(path)
    next(lines)
    os.truncate(path, path.stat().st_size * 3 // 4)
    with pytest.raises(ChunkError, match=str(path)):
        list(lines)


def test_a_local_file_that_is_cut_after_it_was_opened(tmp_path):
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES))
    with open_file(path) as file:
        os.truncate(path, 1000)
        with pytest.raises(OSError, match="1,000 bytes received"):
            file.read()


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
def test_a_local_file_that_is_cut_while_its_source_is_open(tmp_path, name):
    path = tmp_path / name
    first, second = (gzip.compress(part) if name.endswith("gz") else part for part in (b"a\n", b"b\n"))
    path.write_bytes(first + second)
    source = ChunkSource(path)
    assert sorted(source) == ["a", "b"]
    path.write_bytes(first)  # has nothing else that shows that a line is missing
    with pytest.raises(ChunkError, match=f"{path}, line 1: the file has {len(first)} bytes, expected"):
        list(source)


def test_a_pipe_is_read_to_its_end(tmp_path):
    path = tmp_path / "lines.txt"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("a\nb\n",))
    writer.start()
    assert [line for _, line in iter_lines(path)] == ["a", "b"]
    writer.join()
