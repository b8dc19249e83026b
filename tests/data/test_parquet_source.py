"""Parquet files: columns and types, lengths that are counted once, damaged files; local and at URLs."""

import os
import shutil
from unittest import mock

import numpy as np
import pytest

from seqwarm_kernels.data import ChunkError, ParquetSource, count_lengths, write_chunks
from seqwarm_kernels.data.files import lengths
from seqwarm_kernels.data.files.remote import read_range, visible_files, write_file

from .made import TEXTS, remove, same

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TOKENS = [np.arange(number % 13, dtype=np.int32) + number for number in range(1003)]


def parquet(place, name, columns, rows=100, **options):
    """Write a file in row groups of `rows` rows."""
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, row_group_size=rows, write_page_checksum=True, **options)
    place.mkdir(parents=True, exist_ok=True)
    write_file(place / name, bytes(sink.getvalue()))
    return place / name


@pytest.fixture
def texts(place):
    """Two files of 6 and 5 row groups, with lengths."""
    for name, items in (("a.parquet", TEXTS[:550]), ("b.parquet", TEXTS[550:])):
        parquet(place, name, {"text": items, "length": [len(item) for item in items], "more": [0] * len(items)})
    return place


def test_the_items_in_order(texts):
    source = ParquetSource(texts, "text", length_column="length", with_lengths=True, shuffle=False)
    assert list(source) == [(item, len(item)) for item in TEXTS]
    assert source.lengths().tolist() == list(map(len, TEXTS))
    for paths, items in (
        (str(texts / "b.parquet"), TEXTS[550:]),
        ([texts], TEXTS),
        ([texts / "b.parquet", texts / "a.parquet"], TEXTS[550:] + TEXTS[:550]),
    ):
        assert list(ParquetSource(paths, "text", shuffle=False)) == items


def test_types_of_columns(tmp_path):
    fixed = pa.FixedSizeListArray.from_arrays(pa.array(range(40)), 4)
    for column, items in (
        (fixed, np.arange(40).reshape(10, 4)),
        (pa.array([each.tolist() for each in TOKENS], pa.large_list(pa.uint16())), TOKENS),
        (pa.array(["a", "b", "a"]).dictionary_encode(), ["a", "b", "a"]),
    ):
        source = ParquetSource(parquet(tmp_path, "a.parquet", {"a": column}, rows=3), shuffle=False)
        assert same(list(source), items)
    source = ParquetSource(parquet(tmp_path, "a.parquet", {"ids": TOKENS}), with_lengths=True, shuffle=False)
    items, found = zip(*source, strict=True)
    assert same(items, TOKENS)
    assert list(found) == source.lengths().tolist() == list(map(len, TOKENS))
    items[0].setflags(write=True)
    assert all(item.base is None for item in items)  # an item keeps no other item in memory


ROWS, FLAGS = [[7, 2], [3], [4, 5, 6]], [[True, False], [True], [False, True, True]]


@pytest.mark.parametrize(
    ("name", "values", "is_refused"),
    [
        ("labels", ROWS, True),
        ("target_ids", pa.array(ROWS, pa.large_list(pa.int16())), True),
        ("assistant_masks", FLAGS, True),
        ("label", [0, 1, 0], False),
        ("attention_mask", ROWS, False),
    ],
)
def test_columns_that_say_what_is_trained_on(tmp_path, name, values, is_refused):
    parquet(tmp_path, "a.parquet", {"ids": ROWS, name: values, "text": ["a", "b", "c"]})
    if is_refused:
        with pytest.raises(ChunkError, match=name):
            ParquetSource(tmp_path, "ids")
        items = list(ParquetSource(tmp_path, ("ids", name), shuffle=False, with_lengths=True))
        assert [item[name].tolist() for item, _ in items] == (FLAGS if values is FLAGS else ROWS)
        assert [length for _, length in items] == [2, 1, 3]
    else:
        assert same(list(ParquetSource(tmp_path, "ids", shuffle=False)), ROWS)
    assert list(ParquetSource(tmp_path, "text", shuffle=False)) == ["a", "b", "c"]
    with_text = list(ParquetSource(tmp_path, ["text", "ids"], shuffle=False))
    assert [(item["text"], item["ids"].tolist()) for item in with_text] == list(zip("abc", ROWS, strict=True))


# ---- lengths that are counted once


def test_lengths_that_are_counted_once(texts):
    length = mock.Mock(side_effect=lambda item: 2 * len(item))
    count_lengths(texts, length, "text")
    assert length.mock_calls == list(map(mock.call, TEXTS))
    length.reset_mock()
    count_lengths(texts, length, "text")
    again = [TEXTS[index] for index in (0, 49, 99, 550, 599, 649)]  # of the first row group of each file
    assert length.mock_calls == list(map(mock.call, again))
    source = ParquetSource(texts, "text", with_lengths=True)
    assert all(length == 2 * len(item) for item, length in source)
    assert source.lengths().tolist() == [2 * len(item) for item in TEXTS]
    (kept, _) = (path for path in visible_files(texts) if path.name.endswith(".npy"))
    for damaged in (b"junk", kept.read_bytes()[:-9], kept.read_bytes()[:100]):
        write_file(kept, damaged)
        for use in (list, lambda source: source.lengths()):
            with pytest.raises(ChunkError, match=str(kept)):
                use(source)
    count_lengths(texts, length, "text")
    assert source.lengths().tolist() == [2 * len(item) for item in TEXTS]
    with pytest.raises(ValueError, match="length_fn"):
        count_lengths(texts, len, "text")


def test_lengths_are_read_where_they_are_needed(texts, monkeypatch):
    count_lengths(texts, len, "text")
    read = mock.Mock(wraps=read_range)
    monkeypatch.setattr(lengths, "read_range", read)
    source = ParquetSource(texts, "text", with_lengths=True, shuffle=False)
    assert list(source) == [(item, len(item)) for item in TEXTS]
    assert sum(end - start for _, start, end in (call.args for call in read.mock_calls)) == 11 * 128 + 4 * len(TEXTS)


def test_lengths_that_are_counted_come_before_those_of_tokens(tmp_path):
    rows = {"ids/1": TOKENS, "text": [f"text {number}" for number in range(len(TOKENS))]}
    path = parquet(tmp_path, "a.parquet", rows)
    assert ParquetSource(path, "ids/1").lengths().tolist() == list(map(len, TOKENS))
    for column, length in (
        ("ids/1", lambda tokens: len(tokens) + 2),
        (["text", "ids/1"], lambda item: len(item["text"]) + len(item["ids/1"])),
    ):
        count_lengths(path, length, column)
        source = ParquetSource(path, column, with_lengths=True, shuffle=False)
        items, found = zip(*source, strict=True)
        assert list(found) == source.lengths().tolist() == [length(item) for item in items]


def test_lengths_of_changed_and_of_copied_files(tmp_path):
    """Neither the size of an uncompressed file nor its footer changes with the order of its rows."""
    for texts in (TEXTS, [TEXTS[10], *TEXTS[1:10], TEXTS[0], *TEXTS[11:]]):
        path = parquet(tmp_path / "one", "a.parquet", {"text": texts}, compression="none")
        with pytest.raises(ValueError, match="lengths"):
            ParquetSource(path, with_lengths=True)
        count_lengths(path, len)
        assert all(len(item) == length for item, length in ParquetSource(path, with_lengths=True))
    shutil.copytree(tmp_path / "one", tmp_path / "other", copy_function=shutil.copyfile)
    os.utime(tmp_path / "other" / "a.parquet", (0, 0))  # the time of change of a copy is another one
    assert ParquetSource(tmp_path / "other", with_lengths=True).lengths().tolist() == list(map(len, texts))


# ---- files that do not fit, and damaged ones


def test_a_file_that_is_named_twice(place):
    """Its items were served twice. A search for files with ** finds a folder and its files."""
    path = parquet(place, "a.parquet", {"text": ["a"]})
    for paths in ([path, str(path)], [place, path], [f"{place}/", place]):
        for use in (ParquetSource, lambda paths: count_lengths(paths, len)):
            with pytest.raises(ValueError, match="paths"):
                use(paths)


def test_folders_with_the_suffix_and_files_without_rows(tmp_path):
    paths = [parquet(tmp_path / f"{name}.parquet", "part.parquet", {"text": [name]}).parent for name in "ab"]
    assert list(ParquetSource(paths, shuffle=False)) == ["a", "b"]
    other = parquet(tmp_path / "c.parquet", "part.parquet", {"text": [[1]]})
    with pytest.raises(ChunkError, match=r"c\.parquet"):
        ParquetSource([*paths, other])
    with pytest.warns(UserWarning, match=r"skipped: .*c\.parquet"):
        assert list(ParquetSource([*paths, other], on_error="skip", shuffle=False)) == ["a", "b"]
    for wrong in (["a.txt"], "missing", [], tmp_path / "nowhere"):
        with pytest.raises(ValueError, match="paths"):
            ParquetSource(wrong)
    with pytest.raises(ChunkError, match="the footer: No such file"):
        ParquetSource("missing.parquet")
    empty = parquet(tmp_path / "empty", "a.parquet", {"text": pa.array([], pa.string())})
    with pytest.raises(ValueError, match="paths"):
        ParquetSource(tmp_path / "empty")
    count_lengths([empty, *paths], len)
    source = ParquetSource([empty, *paths], with_lengths=True, shuffle=False)
    assert list(source) == [("a", 1), ("b", 1)]
    assert source.lengths().tolist() == [1, 1]


def test_a_state_of_other_files_or_columns_is_rejected(tmp_path):
    def written(items):
        return parquet(tmp_path, "a.parquet", {"text": items, "other": items, "ids": [[1]] * len(items)})

    source = ParquetSource(written(TEXTS[:10]), "text")
    for column in ("other", ["text"], ["text", "ids"]):
        with pytest.raises(ValueError, match="column"):
            ParquetSource(tmp_path, column).load_state_dict(source.state_dict())
    written([item.upper() * 2 for item in TEXTS[:10]])
    with pytest.raises(ValueError, match="files"):
        ParquetSource(tmp_path, "text").load_state_dict(source.state_dict())


@pytest.mark.parametrize("damage", [lambda content: content[:-20], lambda _: b"", lambda _: b"text\n" * 100])
def test_a_file_that_is_not_parquet(texts, damage):
    path = texts / "a.parquet"
    write_file(path, damage(path.read_bytes()))
    for use in (lambda: ParquetSource(texts, "text"), lambda: count_lengths(texts, len, "text")):
        with pytest.raises(ChunkError, match=str(path)):
            use()
    with pytest.warns(UserWarning, match=f"skipped: {path}"):
        source = ParquetSource(texts, "text", shuffle=False, on_error="skip")
    assert list(source) == TEXTS[550:]
    assert list(source.skipped) == [str(path)]


def test_a_damaged_row_group(tmp_path):
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    path = parquet(tmp_path, "a.parquet", {"text": TEXTS[:550]}, **plain)
    path.write_bytes(path.read_bytes().replace(b"item 549", b"ITEM 549"))  # which a checksum notices
    with pytest.raises(ChunkError, match=f"{path}.* row group 5"):
        list(ParquetSource(path, "text"))
    source = ParquetSource(path, "text", shuffle=False, on_error="skip")
    with pytest.warns(UserWarning, match="skipped: .*row group 5"):
        assert list(source) == TEXTS[:500]
    assert list(source.skipped) == [f"{path}, row group 5"]


def test_a_file_that_vanishes_or_changes(texts):
    source = ParquetSource(texts, "text")
    parquet(texts, "a.parquet", {"text": TEXTS[:300]}, rows=50)
    with pytest.raises(ChunkError, match=r"a\.parquet"):
        list(source)
    remove(texts / "a.parquet")
    with pytest.raises(ChunkError, match=r"a.parquet: row group \d: No such file"):
        list(source)


@pytest.mark.parametrize(
    ("columns", "options", "named"),
    [
        ({"a": ["x"], "b": ["y"]}, {}, "column"),
        ({"a": ["x"]}, {"column": []}, "column"),
        ({"a": ["x"]}, {"column": "c"}, "parquet.* c "),
        ({"a": ["x"]}, {"length_column": "c"}, "parquet.* c "),
        *(({"a": rows}, {}, "parquet.* 'a'") for rows in ([1.5], [[1.5]], ["x", None], [[1], [2, None]])),
        *(({"a": ["x"], "n": [n]}, {"column": "a", "length_column": "n"}, "parquet.*") for n in (-1, 1.5, None, "x")),
    ],
)
def test_invalid_columns(tmp_path, columns, options, named):
    parquet(tmp_path, "a.parquet", columns)
    with pytest.raises(ValueError, match=named):
        list(ParquetSource(tmp_path, with_lengths="n" in columns, **options))


# ---- write_chunks


def test_write_chunks_of_tokens(tmp_path):
    for number, items in enumerate((TOKENS, [each.tolist() for each in TOKENS], [[2**40], []])):
        write_chunks(items, tmp_path / str(number), 100, format="parquet")
        assert same(list(ParquetSource(tmp_path / str(number), shuffle=False)), items)


@pytest.mark.parametrize(
    "items", [["a", 5], [[1.5]], [[[1]]], [5], ["a", "b", [1], [2]], [[1], [2], "a", "b"], ["a", [1]]]
)
def test_items_that_parquet_does_not_hold(tmp_path, items):
    """Texts and tokens in one call were found when the chunks were read."""
    with pytest.raises(TypeError, match="items"):
        write_chunks(items, tmp_path, 2, format="parquet")
    with pytest.raises(ValueError, match=r"has not finished|has none"):
        ParquetSource(tmp_path)
