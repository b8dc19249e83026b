"""Chunk files are written whole, once, and the same after an interruption; others are not overwritten."""

import io
import json
from importlib.util import find_spec
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from seqwarm_kernels.data import ChunkSource, ParquetSource
from seqwarm_kernels.data.files import compression
from seqwarm_kernels.data.files.manifest import Manifest
from seqwarm_kernels.data.files.reader import ChunkError, read_chunk
from seqwarm_kernels.data.files.writer import write_chunks
from seqwarm_kernels.utils import files

from ..support.tiers import examples

PARQUET = pytest.param({"format": "parquet"}, marks=pytest.mark.skipif(find_spec("pyarrow") is None, reason="pyarrow"))
WITH_ZST = pytest.mark.skipif(compression.zstd is None, reason="backports.zstd is not installed")


def read_all(folder):
    return list(opened(folder))


def opened(folder):
    if Manifest.read(folder).format == "parquet":
        return ParquetSource(folder, shuffle=False, length_column=Manifest.read(folder).length_fn and "length")
    return ChunkSource(folder, shuffle=False)


@pytest.mark.parametrize(
    "settings",
    [{"compression": "none"}, {"compression": "gz"}, pytest.param({"compression": "zst"}, marks=WITH_ZST), PARQUET],
    ids=["none", "gz", "zst", "parquet"],
)
def test_items_are_read_as_they_were_written(tmp_path, settings):
    items = [f"item {number}, ünï {'x' * number}" for number in range(25)]
    manifest = write_chunks(iter(items), tmp_path, 10, **settings, length_fn=len)
    assert read_all(tmp_path) == items
    assert manifest == Manifest.read(tmp_path)
    assert [chunk.items for chunk in manifest.chunks] == [10, 10, 5]
    assert [chunk.bytes for chunk in manifest.chunks] == [(tmp_path / c.file).stat().st_size for c in manifest.chunks]
    assert manifest.items == 25
    assert manifest.length_fn == "len"
    assert opened(tmp_path).lengths().tolist() == [len(item) for item in items]
    assert not list(tmp_path.glob("*.partial"))


@examples(10)
@given(items=st.lists(st.text(st.characters(codec="utf-8"))), size=st.integers(1, 5))
@example(items=["\ufeffa", "\ufeff\ufeff", "b", "\ufeff"], size=1)  # byte order marks
def test_any_lines_are_read_as_written(tmp_path_factory, items, size):
    """Also lines with other characters that some readers treat as the end of a line."""
    items = [item.replace("\n", "") for item in items]
    kept = [item for item in items if item.strip()]
    folder = tmp_path_factory.mktemp("chunks")
    if not kept:
        with pytest.raises(ValueError, match="items"):
            write_chunks(items, folder, size)
        return
    write_chunks(items, folder, size, compression="none")
    assert read_all(folder) == kept


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=5,
)


@examples(10)
@given(items=st.lists(JSON, min_size=1), size=st.integers(1, 5))
def test_any_json_is_read_as_written(tmp_path_factory, items, size):
    folder = tmp_path_factory.mktemp("chunks")
    write_chunks(items, folder, size, format="jsonl", compression="none")
    assert read_all(folder) == items


def times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir() if path.name != "manifest.json"}


@pytest.mark.parametrize("settings", [{}, PARQUET], ids=["text", "parquet"])
def test_existing_files_are_not_written_again(tmp_path, settings):
    items, count = [f"item {number}" for number in range(25)], mock.Mock(side_effect=len)
    manifest = write_chunks(items, tmp_path, 10, length_fn=count, **settings)
    before = times(tmp_path)
    assert write_chunks(items, tmp_path, 10, length_fn=count, **settings) == manifest
    assert times(tmp_path) == before
    again = [items[index] for index in (0, 4, 9, 10, 14, 19, 20, 22, 24)]
    assert count.mock_calls[25:] == list(map(mock.call, again))


def npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("damaged", "problem"),
    [
        *((content, "cannot be read") for content in (b"", b"\x93NUMPY", b"PAR1 and more", None)),
        (npy(np.array([1, 2], np.uint32))[:-4], "must hold 2 lengths"),
        (npy(np.zeros(3, np.uint32)), r"must hold 2 lengths, .* \(3,\)"),
        (npy(np.array([7.5, 9.0])), "must hold 2 lengths"),
    ],
)
def test_damaged_lengths_are_named_and_counted_again(tmp_path, damaged, problem):
    write_chunks(["a", "bb"], tmp_path, length_fn=len)
    path = tmp_path / "chunk-000000.lengths.npy"
    path.unlink() if damaged is None else path.write_bytes(damaged)
    with pytest.raises(ChunkError, match=f"{path}: {problem}"):
        ChunkSource(tmp_path).lengths()
    write_chunks(["a", "bb"], tmp_path, length_fn=len)
    assert ChunkSource(tmp_path).lengths().tolist() == [1, 2]


@pytest.mark.parametrize("settings", [{}, PARQUET], ids=["text", "parquet"])
def test_damaged_chunks_are_written_again(tmp_path, settings, monkeypatch):
    """Under their names when they are whole, and with the permissions of other files."""
    manifest = write_chunks(["a", "b"], tmp_path, 1, length_fn=len, **settings)
    path = tmp_path / manifest.chunks[1].file
    path.write_bytes(path.read_bytes()[:-4])
    for name in ("chunk-000001.lengths.npy", "plain"):
        (tmp_path / name).write_bytes(npy(np.array([77], np.uint32)))
    names = {each.name for each in tmp_path.iterdir()}

    def interrupted(partial, target):
        assert partial.name.startswith(f"{target.name}.")
        assert partial.name.endswith(".partial")
        assert partial.stat().st_mode == (tmp_path / "plain").stat().st_mode
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "replace", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write_chunks(["a", "b"], tmp_path, 1, length_fn=len, **settings)
    assert {each.name for each in tmp_path.iterdir()} == names
    write_chunks(["a", "b"], tmp_path, 1, length_fn=len, **settings)
    assert read_all(tmp_path) == ["a", "b"]
    assert opened(tmp_path).lengths().tolist() == [1, 1]


@pytest.mark.parametrize("index", [0, 9, 19])
def test_lengths_of_another_function_of_the_same_name_are_rejected(tmp_path, index):
    items = ["word"] * 20
    items[index] = "two words"
    write_chunks(items, tmp_path, length_fn=lambda _: 1)
    before = ChunkSource(tmp_path).lengths().tolist()
    with pytest.raises(ValueError, match="length_fn"):
        write_chunks(items, tmp_path, length_fn=lambda text: len(text.split()))
    assert ChunkSource(tmp_path).lengths().tolist() == before


@pytest.mark.parametrize("settings", [{}, PARQUET], ids=["text", "parquet"])
def test_other_items_are_rejected(tmp_path, settings):
    """States of sources of the folder stay valid."""
    write_chunks(["a", "b", "c"], tmp_path, 2, **settings)
    state = opened(tmp_path).state_dict()
    for items, named in (
        (["x", "b", "c"], "chunk-000000"),
        (["a", "b"], "chunk-000001"),
        (["a", "b", "c", "d"], "chunk-000001"),
        (["a", "b", "c"] * 2, "chunk-000001"),
    ):
        with pytest.raises(ValueError, match=named):
            write_chunks(items, tmp_path, 2, **settings)
        assert read_all(tmp_path) == ["a", "b", "c"]
        opened(tmp_path).load_state_dict(state)
    write_chunks(["a", "b"], tmp_path / "full", 2, **settings)
    with pytest.raises(ValueError, match="finished"):
        write_chunks(["a", "b", "c"], tmp_path / "full", 2, **settings)


@pytest.mark.parametrize(
    "settings", [{"items_per_chunk": 3}, {"format": "jsonl"}, {"compression": "none"}, {"length_fn": len}]
)
def test_other_settings_are_rejected(tmp_path, settings):
    write_chunks(["a"], tmp_path)
    with pytest.raises(ValueError, match=next(iter(settings))):
        write_chunks(["a"], tmp_path, **settings)


@pytest.mark.parametrize(
    ("refused", "settings", "repaired"),
    [
        (["a\nb"], {}, {"format": "jsonl"}),
        (["a"], {"length_fn": lambda _: -1}, {"length_fn": len, "items_per_chunk": 3}),
        ([1.5], {"format": "parquet"}, {"format": "jsonl"}),
        ([], {}, {"compression": "none"}),
    ],
)
def test_a_refused_call_does_not_bind_the_repaired_one(tmp_path, refused, settings, repaired):
    """The refused call wrote a manifest, so the next one failed although the folder held no chunks."""
    if "parquet" in settings.values():
        pytest.importorskip("pyarrow")
    with pytest.raises((ValueError, TypeError)):
        write_chunks(refused, tmp_path, **settings)
    assert {path.name for path in tmp_path.iterdir()} <= {"manifest.json"}
    items = refused or ["a"]
    assert write_chunks(items, tmp_path, **repaired) == Manifest.read(tmp_path)
    assert read_all(tmp_path) == items


def test_two_runs_of_other_settings_at_once(tmp_path):
    """One of them raises, although neither had a chunk when the other one began."""

    def length(text):
        if not list(tmp_path.glob("chunk-*")):
            write_chunks(["b"], tmp_path, format="jsonl", progress=False)
        return len(text)

    with pytest.raises(ValueError, match="format"):
        write_chunks(["a"], tmp_path, length_fn=length)
    assert read_all(tmp_path) == ["b"]


def test_a_run_that_ends_in_the_meantime_keeps_its_manifest(tmp_path):
    def items():
        write_chunks(["a", "b"], tmp_path, 1)
        yield "a"
        raise OSError("the network is gone")

    with pytest.raises(OSError, match="the network is gone"):
        write_chunks(items(), tmp_path, 1)
    assert read_all(tmp_path) == ["a", "b"]


@pytest.mark.parametrize(
    ("items", "settings", "named"),
    [
        (["a"], {"items_per_chunk": 0}, "items_per_chunk"),
        (["a"], {"format": "csv"}, "format"),
        (["a"], {"compression": "bz2"}, "compression"),
        *((["a"], {"length_fn": lambda _, length=length: length}, "length_fn") for length in (-1, 1.0, 2**32)),
        (["a", 3], {}, "items"),
        (["a", "b\nc"], {}, "items"),
        (["a\n", "b\n"], {}, "items"),
        (["a", "\ud800"], {}, "surrogates"),
        ([{"a": {1}}], {"format": "jsonl"}, "JSON"),
        *((items, {}, "items") for items in ([], "abc", b"abc", {"train": ["a"]})),
    ],
)
def test_bad_input(tmp_path, items, settings, named):
    with pytest.raises((TypeError, ValueError), match=named):
        write_chunks(items, tmp_path / "chunks", **settings)
    assert not list(tmp_path.glob("chunks/chunk*-000001*"))


def test_zst_without_its_package(tmp_path, monkeypatch):
    monkeypatch.setattr(compression, "zstd", None)
    (tmp_path / "a.txt.zst").write_bytes(b"")
    for use in (lambda: write_chunks(["a"], tmp_path, compression="zst"), lambda: read_chunk(tmp_path / "a.txt.zst")):
        with pytest.raises(ImportError, match="zstd"):
            use()


CHUNK = {"file": "chunk-000000.txt.gz", "items": 5, "bytes": 5}
CHUNKS = [5, *([CHUNK | wrong] for wrong in ({"file": "../other.txt.gz"}, {"items": None}, {"bytes": 0}))]
SETTINGS = {"format": "text", "compression": "gz", "items_per_chunk": 1, "length_fn": None}


@pytest.mark.parametrize("content", [[], {}, {"chunks": None}, *({**SETTINGS, "chunks": each} for each in CHUNKS)])
def test_an_invalid_manifest(tmp_path, content):
    (tmp_path / "manifest.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"manifest\.json: invalid manifest"):
        Manifest.read(tmp_path)
