"""Shards in MosaicML's MDS format: columns, lengths, compressed shards, merged indices, and dtypes of bytes."""

import contextlib
import gzip
import json
import shutil

import numpy as np
import pytest

from seqwarm_kernels.data import ChunkError, MDSSource, PaddedCollator, cut_item

from .made import same
from .token_files import documents, write_mds, write_merged_mds

DOCUMENTS = documents(300)
OTHERS = {"a": "str", "id": "int", "z": "bytes"}, lambda number: {"a": "é" * (number % 5), "id": number, "z": b"\x01"}


@pytest.mark.parametrize("others", [None, OTHERS], ids=["alone", "other columns"])
@pytest.mark.parametrize("encoding", ["bytes", "ndarray:uint16"])
def test_columns(tmp_path, encoding, others):
    source = MDSSource(write_mds(tmp_path, DOCUMENTS, encoding=encoding, others=others), dtype="uint16", shuffle=False)
    np.testing.assert_array_equal(source.lengths(), list(map(len, DOCUMENTS)))
    assert same(source, DOCUMENTS)
    assert next(iter(source)).dtype == np.uint16


COMPRESSIONS = ["br", "bz2", "gz", "snappy", "zstd"]


@pytest.mark.parametrize("compression", [*COMPRESSIONS, "zstd:19"])
def test_compressed_shards(tmp_path, compression):
    folder = write_mds(tmp_path, DOCUMENTS, compression=compression)
    files = sorted(folder.iterdir())
    for _ in range(2):  # unpacked, and as it was unpacked before
        assert same(MDSSource(folder, shuffle=False), DOCUMENTS)
    assert sorted(folder.iterdir()) == files


def test_copies_of_unpacked_shards(tmp_path, monkeypatch):
    folder = write_mds(tmp_path, DOCUMENTS[:5], compression="gz")
    assert same(MDSSource(folder, shuffle=False), DOCUMENTS[:5])
    shutil.rmtree(folder)
    write_mds(tmp_path, DOCUMENTS[4::-1], compression="gz")
    assert same(MDSSource(folder, shuffle=False), DOCUMENTS[4::-1])
    packed = folder / "shard.00000.mds.gz"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ChunkError, match=f"{packed}: cannot be read: .*Not a directory"):
        MDSSource(folder).lengths()
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))  # as mosaicml-streaming unpacks it
    packed.unlink()
    assert same(MDSSource(folder, shuffle=False), DOCUMENTS[4::-1])


def rewritten(folder, change):
    """Change the entries of an index."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index["shards"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_a_shard_that_unpacks_to_another_size(tmp_path, compression):
    """It was written whole under its final name, and every later run refused it."""
    folder = write_mds(tmp_path, [np.zeros(2**20, np.uint16)], compression=compression, size_limit=None)
    files, right = sorted(folder.iterdir()), (folder / "index.json").read_text()
    size = json.loads(right)["shards"][0]["raw_data"]["bytes"]
    for wrong in (34, size + 1):
        rewritten(folder, lambda shards, wrong=wrong: shards[0]["raw_data"].update(bytes=wrong))
        for use in (list, MDSSource.lengths):
            with pytest.raises(ChunkError, match=rf"shard\.00000\.mds\.{compression}: .*bytes.* index.json"):
                use(MDSSource(folder))
    assert sorted(folder.iterdir()) == files
    (folder / "index.json").write_text(right)
    assert MDSSource(folder).lengths().tolist() == [2**20]


def test_an_index_without_shards(tmp_path):
    folder = write_mds(tmp_path, DOCUMENTS[:5])
    rewritten(folder, list.clear)
    with pytest.raises(ChunkError, match=r"index\.json: the index has no shards"):
        MDSSource(folder)


@pytest.mark.parametrize("name", ["../other/shard.00000.mds", "/shard.00000.mds", "a/../../b", ""])
def test_an_index_does_not_say_where_a_shard_is_unpacked(tmp_path, name):
    folder = write_mds(tmp_path / "data", DOCUMENTS[:5], compression="gz")
    rewritten(folder, lambda shards: shards[0]["raw_data"].update(basename=name))
    files = sorted((tmp_path / "data").rglob("*"))
    with contextlib.suppress(ChunkError):
        list(MDSSource(folder))
    assert sorted((tmp_path / "data").rglob("*")) == files
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "cache"}


# ---- rows and columns


def test_rows_of_one_length_and_long_rows(tmp_path):
    """The length of an ndarray takes 0, 1, 2 or 4 bytes."""
    rows = [np.full(64, number, np.int32) for number in range(100)]
    source = MDSSource(write_mds(tmp_path, rows, encoding="ndarray:int32:64"), shuffle=False)
    assert set(source.lengths()) == {64}
    assert same(source, rows)
    lengths = [1, 127, 128, 255, 256, 257, 65_535, 65_536, 70_000]
    rows = [np.zeros(length, np.int64) for length in lengths]
    (tmp_path / "long").mkdir()
    source = MDSSource(write_mds(tmp_path / "long", rows, encoding="ndarray:int64", size_limit=None), shuffle=False)
    assert source.lengths().tolist() == lengths
    assert same(source, rows)


def test_texts(tmp_path):
    texts = ["é" * length for length in range(50)]
    for number, others in enumerate((None, OTHERS)):
        (tmp_path / str(number)).mkdir()
        source = MDSSource(write_mds(tmp_path / str(number), texts, encoding="str", others=others), shuffle=False)
        assert list(source) == texts
        assert source.lengths().tolist() == [2 * len(text) for text in texts]


@pytest.mark.parametrize("encoding", ["bytes", "ndarray:uint16"])
def test_labels_are_read_with_their_tokens(tmp_path, encoding):
    """The dtype is that of bytes alone."""
    labels = [[-100] * len(tokens[:3]) + tokens[3:].tolist() for tokens in DOCUMENTS]
    others = {"labels": "ndarray:int64"}, lambda number: {"labels": np.array(labels[number])}
    folder = write_mds(tmp_path, DOCUMENTS, encoding=encoding, others=others)
    with pytest.raises(ValueError, match=r"column must name 'labels' beside 'tokens', or be \['tokens'\]"):
        MDSSource(folder, dtype="uint16")
    alone = MDSSource(folder, column=["tokens"], dtype="uint16", shuffle=False)
    assert same([item["tokens"] for item in alone], DOCUMENTS)
    source = MDSSource(folder, column=["tokens", "labels"], dtype="uint16", shuffle=False)
    items = list(source)
    assert same([item["tokens"] for item in items], DOCUMENTS)
    assert same([item["labels"] for item in items], labels)
    assert source.lengths().tolist() == list(map(len, DOCUMENTS))
    item = {"input_ids": items[7]["tokens"], "labels": items[7]["labels"]}
    assert PaddedCollator()([cut_item(item, 2, 3)])["labels"].tolist() == [labels[7][2:5]]


# ---- the dtype of bytes


@pytest.mark.parametrize(("stored", "narrow"), [("int32", "uint16"), ("int64", "int32")])
def test_a_dtype_of_bytes_that_is_too_narrow(tmp_path, stored, narrow):
    made = [np.arange(3, 9, dtype=stored) * 9000] * 3
    folder = write_mds(tmp_path, made, encoding="bytes")
    assert same(MDSSource(folder, dtype=stored, shuffle=False), made)
    for use in (list, MDSSource.lengths):
        source = MDSSource(folder, dtype=narrow)
        for _ in range(2):  # and not at the first time only
            with pytest.raises(ValueError, match=rf"dtype must be {stored} .* got {narrow}"):
                use(source)


@pytest.mark.parametrize(
    ("encoding", "settings", "named"),
    [
        ("bytes", {}, "dtype"),
        ("ndarray:uint16", {"column": "text"}, "column .* got 'text'"),
        *((encoding, {}, f"column 'tokens' .* got {encoding}") for encoding in ("ndarray", "json", "ndarray:float32")),
        ("ndarray:uint16", {"column": []}, "column"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, encoding, settings, named):
    as_encoded = {"json": np.ndarray.tolist, "ndarray:float32": np.float32}.get(encoding, np.asarray)
    folder = write_mds(tmp_path, list(map(as_encoded, DOCUMENTS[:10])), encoding=encoding)
    with pytest.raises(ValueError, match=named):
        MDSSource(folder, **settings)


# ---- merged indices


def test_a_merged_index(tmp_path):
    folder = write_merged_mds(tmp_path / "merged", [DOCUMENTS[:120], DOCUMENTS[120:]])
    from streaming import LocalDataset

    assert same(MDSSource(folder, shuffle=False), [sample["tokens"] for sample in LocalDataset(str(folder))])
    with pytest.raises(ValueError, match=r"folders .*shard.00000.mds twice"):
        MDSSource([folder, folder / "1"])


# ---- several dimensions


@pytest.mark.parametrize("wrong", [0, 5])
def test_arrays_of_several_dimensions(tmp_path, wrong):
    """Their rows counted as tokens."""
    made = [np.arange(12, dtype=np.uint16)] * 9
    made[wrong] = made[wrong].reshape(4, 3)
    folder = write_mds(tmp_path, made)
    for use in (list, MDSSource.lengths):
        with pytest.raises(ChunkError, match=rf"sample {wrong} .* column 'tokens' must have one dim.* \(4, 3\)"):
            use(MDSSource(folder))
