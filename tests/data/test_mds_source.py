"""Shards in MosaicML's MDS format: columns, lengths, compressed shards, merged indices, and a wrong dtype."""

import contextlib
import gzip
import json
import shutil

import numpy as np
import pytest

from seqwarm_kernels.data import ChunkError, MDSSource, PaddedCollator, cut_item

from .token_files import documents, need_mds, write_mds

DOCUMENTS = documents(300)
OTHERS = {"a": "str", "id": "int", "z": "bytes"}, lambda number: {"a": "é" * (number % 5), "id": number, "z": b"\x01"}


@pytest.fixture(autouse=True)
def streaming(tmp_path, monkeypatch):
    need_mds()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def same(found, expected):
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


@pytest.mark.parametrize("others", [None, OTHERS], ids=["alone", "other columns"])
@pytest.mark.parametrize("encoding", ["bytes", "ndarray:uint16"])
def test_columns(tmp_path, encoding, others):
    source = MDSSource(write_mds(tmp_path, DOCUMENTS, encoding=encoding, others=others), dtype="uint16", shuffle=False)
    np.testing.assert_array_equal(source.lengths(), list(map(len, DOCUMENTS)))
    assert same(list(source), DOCUMENTS)
    assert next(iter(source)).dtype == np.uint16


@pytest.mark.parametrize("compression", ["br", "bz2", "gz", "snappy", "zstd", "zstd:19"])
def test_compressed_shards(tmp_path, compression):
    folder = write_mds(tmp_path, DOCUMENTS, compression=compression)
    files = sorted(folder.iterdir())
    for _ in range(2):  # unpacked, and as it was unpacked before
        assert same(list(MDSSource(folder, shuffle=False)), DOCUMENTS)
    assert sorted(folder.iterdir()) == files


def test_compressed_shards_that_are_written_again(tmp_path):
    folder = write_mds(tmp_path, DOCUMENTS[:5], compression="gz")
    assert same(list(MDSSource(folder, shuffle=False)), DOCUMENTS[:5])
    shutil.rmtree(folder)
    write_mds(tmp_path, DOCUMENTS[4::-1], compression="gz")
    assert same(list(MDSSource(folder, shuffle=False)), DOCUMENTS[4::-1])


def test_a_shard_that_mosaicml_streaming_has_unpacked(tmp_path):
    folder = write_mds(tmp_path, DOCUMENTS[:9], compression="gz")
    packed = folder / "shard.00000.mds.gz"
    packed.with_suffix("").write_bytes(gzip.decompress(packed.read_bytes()))
    packed.unlink()
    assert same(list(MDSSource(folder, shuffle=False)), DOCUMENTS[:9])


def test_compressed_shards_that_cannot_be_kept(tmp_path, monkeypatch):
    folder = write_mds(tmp_path, DOCUMENTS, compression="gz")
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ChunkError, match=r"shard\.00000\.mds\.gz: cannot be read: .*Not a directory"):
        MDSSource(folder).lengths()


def rewritten(folder, change):
    """Change the entries of an index."""
    path = folder / "index.json"
    index = json.loads(path.read_text())
    change(index["shards"])
    path.write_text(json.dumps(index))


@pytest.mark.parametrize("compression", ["br", "bz2", "gz", "snappy", "zstd"])
@pytest.mark.parametrize("wrong", [-1, 1])
def test_a_shard_that_unpacks_to_another_size(tmp_path, compression, wrong):
    """It was written whole under its final name, and every later run refused it."""
    folder = write_mds(tmp_path, [np.zeros(2**20, np.uint16)], compression=compression, size_limit=None)
    files = sorted(folder.iterdir())

    def change(shards):
        shards[0]["raw_data"]["bytes"] = 34 if wrong < 0 else shards[0]["raw_data"]["bytes"] + 1

    right = (folder / "index.json").read_text()
    rewritten(folder, change)
    for use in (list, lambda source: source.lengths()):
        with pytest.raises(ChunkError, match=rf"shard\.00000\.mds\.{compression}: .*bytes.* index.json"):
            use(MDSSource(folder))
    assert sorted(folder.iterdir()) == files
    (folder / "index.json").write_text(right)
    assert MDSSource(folder).lengths().tolist() == [2**20]


def test_rows_of_one_length_and_long_rows(tmp_path):
    """The length of an ndarray takes 0, 1, 2 or 4 bytes."""
    rows = [np.full(64, number, np.int32) for number in range(100)]
    source = MDSSource(write_mds(tmp_path, rows, encoding="ndarray:int32:64"), shuffle=False)
    assert set(source.lengths()) == {64}
    assert same(list(source), rows)
    lengths = [1, 127, 128, 255, 256, 257, 65_535, 65_536, 70_000]
    rows = [np.zeros(length, np.int64) for length in lengths]
    (tmp_path / "long").mkdir()
    source = MDSSource(write_mds(tmp_path / "long", rows, encoding="ndarray:int64", size_limit=None), shuffle=False)
    assert source.lengths().tolist() == lengths
    assert same(list(source), rows)


def test_texts(tmp_path):
    texts = ["é" * length for length in range(50)]
    for number, others in enumerate((None, OTHERS)):
        (tmp_path / str(number)).mkdir()
        source = MDSSource(write_mds(tmp_path / str(number), texts, encoding="str", others=others), shuffle=False)
        assert list(source) == texts
        assert source.lengths().tolist() == [2 * len(text) for text in texts]


def test_labels_are_read_with_their_tokens(tmp_path):
    labels = [[-100] * len(tokens[:3]) + tokens[3:].tolist() for tokens in DOCUMENTS]
    others = {"labels": "ndarray:int64"}, lambda number: {"labels": np.array(labels[number])}
    folder = write_mds(tmp_path, DOCUMENTS, others=others)
    with pytest.raises(ValueError, match=r"column must name 'labels' beside 'tokens', or be \['tokens'\]"):
        MDSSource(folder)
    assert same([item["tokens"] for item in MDSSource(folder, column=["tokens"], shuffle=False)], DOCUMENTS)
    source = MDSSource(folder, column=["tokens", "labels"], shuffle=False)
    items = list(source)
    assert same([item["tokens"] for item in items], DOCUMENTS)
    assert same([item["labels"] for item in items], labels)
    assert source.lengths().tolist() == list(map(len, DOCUMENTS))
    item = {"input_ids": items[7]["tokens"], "labels": items[7]["labels"]}
    assert PaddedCollator()([cut_item(item, 2, 3)])["labels"].tolist() == [labels[7][2:5]]


# ---- the dtype of bytes


def of_bytes(folder, made):
    folder.mkdir()
    return write_mds(folder, made, encoding="bytes")


VOCABULARIES = {
    "a few": lambda count: np.arange(count) % 3 + 1,
    "GPT-2": lambda count: np.random.RandomState(count).randint(0, 50_257, count),
    "Llama 3": lambda count: np.random.RandomState(count).randint(0, 128_256, count),
    "Gemma": lambda count: np.random.RandomState(count).randint(0, 262_144, count),
    "labels": lambda count: np.where(np.arange(count) < 2, -100, 50_256),
}


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("stored", ["uint16", "int32", "uint32", "int64"])
@pytest.mark.parametrize("lengths", [[3], [5, 2, 9, 1, 14], [512] * 3], ids=["one", "several", "rows"])
def test_the_dtype_of_bytes(tmp_path, vocabulary, stored, lengths):
    """Tokens of 32 or 64 bits that were read as those of 16 are served with zeros between them."""
    made = [VOCABULARIES[vocabulary](length) for length in lengths]
    if max(map(np.max, made)) > np.iinfo(stored).max or min(map(np.min, made)) < np.iinfo(stored).min:
        return
    made = [document.astype(stored) for document in made]
    folder = of_bytes(tmp_path / "a", made)
    assert same(list(MDSSource(folder, dtype=stored, shuffle=False)), made)
    assert MDSSource(folder, dtype=stored).lengths().tolist() == lengths
    width = np.dtype(stored).itemsize
    for narrow in ("uint16", "int16", "int32", "uint32"):
        if np.dtype(narrow).itemsize < width:
            for use in (list, lambda source: source.lengths()):
                source = MDSSource(folder, dtype=narrow)
                with pytest.raises(
                    ValueError, match=rf"dtype must be int{8 * width} for column 'tokens' .* got {narrow}"
                ):
                    use(source)
                with pytest.raises(ValueError, match="dtype must be"):  # and not at the first time only
                    use(source)


@pytest.mark.parametrize("seed", range(20))
def test_right_dtypes_are_taken(tmp_path, seed):
    """Also tokens of small vocabularies, of padded rows, and of even lengths."""
    random = np.random.RandomState(seed)
    vocabulary = int(random.choice([2, 4, 8, 256, 50_257]))
    made = [random.randint(0, vocabulary, 2 * random.randint(1, 50)).astype(np.uint16) for _ in range(20)]
    made = [np.append(document, np.zeros(2 * random.randint(20), np.uint16)) for document in made]
    made.append(np.array([1, 1], np.uint16))
    made += [np.array([7, 1], np.uint16)] * 30  # a token and an end
    assert same(list(MDSSource(of_bytes(tmp_path / "a", made), dtype="uint16", shuffle=False)), made)
    if vocabulary <= 256:
        narrow = [document.astype(np.uint8) for document in made]
        assert same(list(MDSSource(of_bytes(tmp_path / "b", narrow), dtype="uint8", shuffle=False)), narrow)


def test_a_token_and_an_end_in_each_document(tmp_path):
    """They were taken for one token of int32."""
    made = [np.array([number % 50_257, 2], np.uint16) for number in range(10_000)]
    assert same(list(MDSSource(of_bytes(tmp_path / "a", made), dtype="uint16", shuffle=False)), made)


@pytest.mark.parametrize(
    ("encoding", "settings", "message"),
    [
        ("bytes", {}, "dtype must be that of the tokens in column 'tokens' of .*, which holds bytes, got None"),
        ("ndarray:uint16", {"column": "text"}, "column must be one of tokens of .*, got 'text'"),
        ("ndarray", {}, "column 'tokens' of .* must hold bytes, .* got ndarray"),
        ("json", {}, "column 'tokens' of .* must hold bytes, .* got json"),
        ("ndarray:float32", {}, "column 'tokens' of .* must hold bytes, .* got ndarray:float32"),
        ("ndarray:uint16", {"column": []}, r"column must be a name or a list of names, got \[\]"),
    ],
)
def test_columns_that_do_not_fit(tmp_path, encoding, settings, message):
    made = [document.astype(np.float32) for document in DOCUMENTS] if "float" in encoding else DOCUMENTS
    made = [document.tolist() for document in made] if encoding == "json" else made
    folder = write_mds(tmp_path, made[:10], encoding=encoding)
    with pytest.raises(ValueError, match=message):
        MDSSource(folder, **settings)


# ---- merged indices


def merged(folder, parts, **options):
    """Parts in folders, and an index of all of them, as mosaicml-streaming makes it."""
    from streaming.base.util import merge_index

    for number, part in enumerate(parts):
        (folder / f"part{number}").mkdir(parents=True)
        write_mds(folder / f"part{number}", part, **options).rename(folder / str(number))
    merge_index(str(folder), keep_local=True)
    return folder


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_merged_index(tmp_path, compression, monkeypatch):
    folder = merged(tmp_path / "merged", [DOCUMENTS[:120], DOCUMENTS[120:]], compression=compression)
    source = MDSSource(folder, shuffle=False)
    order = [item.tolist() for item in source]
    assert sorted(order) == sorted(document.tolist() for document in DOCUMENTS)
    from streaming import LocalDataset

    if compression is None:
        assert order == [sample["tokens"].tolist() for sample in LocalDataset(str(folder))]
    assert source.lengths().tolist() == list(map(len, order))
    with pytest.raises(ValueError, match=r"folders must name each shard once, got .*shard.00000.mds twice"):
        MDSSource([folder, folder / "1"])


def test_a_merged_index_at_a_url(tmp_path, s3, monkeypatch):
    import s3fs

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = merged(tmp_path / "merged", [DOCUMENTS[:120], DOCUMENTS[120:]], compression="gz")
    s3fs.S3FileSystem(skip_instance_cache=True).put(f"{folder}/", "bucket/merged/", recursive=True)
    assert same(list(MDSSource("s3://bucket/merged")), list(MDSSource(folder)))


@pytest.mark.parametrize("name", ["../other/shard.00000.mds", "/shard.00000.mds", "a/../../b", ""])
def test_an_index_does_not_say_where_a_shard_is_unpacked(tmp_path, name):
    folder = write_mds(tmp_path / "data", DOCUMENTS[:5], compression="gz")
    rewritten(folder, lambda shards: shards[0]["raw_data"].update(basename=name))
    files = sorted((tmp_path / "data").rglob("*"))
    with contextlib.suppress(ChunkError):
        list(MDSSource(folder))
    assert sorted((tmp_path / "data").rglob("*")) == files
    assert {path.name for path in tmp_path.iterdir()} <= {"data", "cache"}


# ---- several dimensions


@pytest.mark.parametrize("wrong", [0, 5])
def test_arrays_of_several_dimensions(tmp_path, wrong):
    """Their rows counted as tokens."""
    made = [np.arange(12, dtype=np.uint16)] * 9
    made[wrong] = made[wrong].reshape(4, 3)
    folder = write_mds(tmp_path, made)
    for use in (list, lambda source: source.lengths()):
        with pytest.raises(ChunkError, match=rf"sample {wrong} .* column 'tokens' must have one dim.* \(4, 3\)"):
            use(MDSSource(folder))


def test_the_dtype_is_that_of_bytes_alone(tmp_path):
    others = {"labels": "ndarray:int64"}, lambda number: {"labels": np.full(len(DOCUMENTS[number]), -100)}
    folder = write_mds(tmp_path, DOCUMENTS, encoding="bytes", others=others)
    source = MDSSource(folder, column=["tokens", "labels"], dtype="uint16", shuffle=False)
    assert same([item["tokens"] for item in source], DOCUMENTS)
    assert {item["labels"].dtype for item in source} == {np.dtype("int64")}
