"""Chunk files: lists of files, folders of `write_chunks`, and damaged files that raise or are skipped."""

import gzip
from unittest import mock

import pytest

from seqwarm_kernels.data.files.reader import ChunkError
from seqwarm_kernels.data.files.remote import write_file
from seqwarm_kernels.data.files.writer import write_chunks
from seqwarm_kernels.data.sources import chunk_source
from seqwarm_kernels.data.sources.chunk_source import ChunkSource

from .made import TEXTS, remove


def test_restoring_reads_the_open_buffer_only(folder, monkeypatch):
    read = mock.Mock(wraps=chunk_source.read_chunk)
    monkeypatch.setattr(chunk_source, "read_chunk", read)
    source = ChunkSource(folder, buffer_chunks=3)
    iterator = iter(source)
    for _ in range(950):
        next(iterator)
    assert read.call_count == 11
    restored, of_open_files = ChunkSource(folder, buffer_chunks=3), read.mock_calls[9:]
    read.reset_mock()
    restored.load_state_dict(source.state_dict())
    read.assert_not_called()
    assert next(iter(restored)) == next(iterator)
    assert read.mock_calls == of_open_files


DAMAGES = {
    "missing": remove,
    "truncated": lambda path: write_file(path, path.read_bytes()[:-12]),
    "fewer items": lambda path: write_file(path, gzip.compress(b"another\n" * 9)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_file_raises_or_is_skipped_and_counted(place, damage):
    write_chunks(TEXTS[:100], place, 10)
    bad = place / "chunk-000001.txt.gz"
    DAMAGES[damage](bad)
    with pytest.raises(ChunkError, match=str(bad)):
        list(ChunkSource(place))
    source = ChunkSource(place, on_error="skip", shuffle=False)
    with pytest.warns(UserWarning, match=f"skipped: {bad}") as caught:
        kept = [*source, *source]
    assert kept == (TEXTS[:10] + TEXTS[20:100]) * 2
    assert len(caught) == 1
    assert list(source.skipped) == [str(bad)]
    assert source.skipped[str(bad)].startswith(str(bad))


def test_a_missing_file_of_a_list_is_skipped(tmp_path):
    path, missing = tmp_path / "a.txt", tmp_path / "missing.txt"
    path.write_text("a\n")
    with pytest.warns(UserWarning, match=f"skipped: {missing}"):
        source = ChunkSource([path, missing], on_error="skip")
    assert list(source) == ["a"]
    assert list(source.skipped) == [str(missing)]


def test_a_list_of_files(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"text": "b"}\n\n{"text": "c"}\n')
    (tmp_path / "a.txt").write_text("a\n\n \nlast, without a newline")
    paths = [str(tmp_path / "b.jsonl"), tmp_path / "a.txt"]
    assert list(ChunkSource(paths, shuffle=False)) == [{"text": "b"}, {"text": "c"}, "a", "last, without a newline"]
    assert list(ChunkSource(tmp_path / "a.txt", shuffle=False)) == ["a", "last, without a newline"]


def test_a_state_of_other_files_of_the_same_names_is_rejected(tmp_path):
    paths = [tmp_path / kind / "a.txt" for kind in ("one", "other", "moved")]
    for path, text in zip(paths, ("a\nb\n", "another\n", "c\nd\n"), strict=True):
        path.parent.mkdir()
        path.write_text(text)
    state = ChunkSource(paths[0]).state_dict()
    with pytest.raises(ValueError, match="files"):
        ChunkSource(paths[1]).load_state_dict(state)
    ChunkSource(paths[2]).load_state_dict(state)


def test_paths_and_settings_that_do_not_fit(tmp_path, folder):
    """What the paths name is found when the source is made, and no file is read twice in an epoch."""
    path, missing = tmp_path / "a.txt", tmp_path / "missing.txt"
    path.write_text("a\n")
    for paths, settings, named in (
        ([path, f"file://{path}"], {}, r"paths .*a\.txt twice"),
        (["memory://a/b.txt", "filecache::memory://a/b.txt"], {}, r"paths .*memory://a/b\.txt twice"),
        ([], {}, "paths"),
        ([path, missing], {}, str(missing)),
        (["a.csv", "b.csv"], {}, "paths"),
        (path, {"with_lengths": True}, "length_fn"),
        (folder, {"world_size": 12}, "paths .* 12 ranks, got 11"),
        (folder, {"buffer_chunks": 0}, "buffer_chunks"),
        (folder, {"on_error": "ignore"}, "on_error"),
    ):
        with pytest.raises(ValueError, match=named):
            ChunkSource(paths, **settings)
    (tmp_path / "b.txt").symlink_to(path)  # to repeat its items on purpose
    assert list(ChunkSource([path, tmp_path / "b.txt"])) == ["a", "a"]


def test_files_and_folders_that_are_not_ready(place):
    for missing, named in ((place, f"paths .* got {place}"), (place / "a.txt", f"{place}/a.txt: ")):
        with pytest.raises(ValueError, match=named):
            ChunkSource(missing)
    with pytest.raises(ValueError, match="items"):
        write_chunks(["a", "b\nc"], place, 1)
    with pytest.raises(ValueError, match=f"finished {place}"):
        ChunkSource(place)
    write_chunks(["a"], place, 1)
    for use in (lambda: ChunkSource(place, with_lengths=True), ChunkSource(place).lengths):
        with pytest.raises(ValueError, match=f"length_fn, got {place}"):
            use()
    remove(place / "manifest.json")
    with pytest.raises(ChunkError, match=f"{place}/manifest.json: "):
        ChunkSource(place)
    write_chunks([[1]], place / "parquet", format="parquet")
    with pytest.raises(ValueError, match="use ParquetSource"):
        ChunkSource(place / "parquet")
