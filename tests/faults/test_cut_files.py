"""A local file that is cut while its source is open raises an error."""

import gzip
import os
import threading

import pytest

from seqwarm_kernels.data import ChunkError, ChunkSource
from seqwarm_kernels.data.files.reader import iter_lines

LINES = [f"line {number}" for number in range(100_000)]


def test_a_compressed_file_that_is_cut_while_it_is_read(tmp_path):
    path = tmp_path / "lines.txt.gz"
    path.write_bytes(gzip.compress("\n".join(LINES).encode()))
    lines = iter_lines(path)
    next(lines)
    os.truncate(path, path.stat().st_size * 3 // 4)
    with pytest.raises(ChunkError, match=str(path)):
        list(lines)


@pytest.mark.parametrize("name", ["lines.txt", "lines.txt.gz"])
def test_a_local_file_that_is_cut_while_its_source_is_open(tmp_path, name):
    path = tmp_path / name
    first, second = (gzip.compress(part) if name.endswith("gz") else part for part in (b"a\n", b"b\n"))
    path.write_bytes(first + second)
    source = ChunkSource(path)
    assert sorted(source) == ["a", "b"]
    path.write_bytes(first)  # has nothing else that shows that a line is missing
    with pytest.raises(ChunkError, match=f"{path}: the file has {len(first)} bytes, expected"):
        list(source)


def test_a_pipe_is_read_to_its_end(tmp_path):
    path = tmp_path / "lines.txt"
    os.mkfifo(path)
    writer = threading.Thread(target=path.write_text, args=("a\nb\n",))
    writer.start()
    assert [line for _, line in iter_lines(path)] == ["a", "b"]
    writer.join()
