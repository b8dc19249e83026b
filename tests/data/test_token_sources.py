"""Sources of tokens: documents of every format, where they end, and their lengths."""

import itertools
import os
from unittest import mock

import numpy as np
import pytest

from seqwarm_kernels.data import MegatronSource, PackedCollator, TokenSource
from seqwarm_kernels.data.files import document_ends
from seqwarm_kernels.data.files.remote import check_location, visible_files, write_file

from .made import same
from .token_files import END, documents, ends, numbers, write_flat, write_llm_c, write_megatron, write_npy

DOCUMENTS = documents(1003)


def test_the_order_mixes_runs_of_all_files(tmp_path):
    paths = [write_llm_c(tmp_path, DOCUMENTS[begin : begin + 50], name=f"{begin}.bin") for begin in range(0, 1000, 50)]
    source = TokenSource(paths, end_token=END, shuffle=False)
    assert same(source, DOCUMENTS[:1000])
    assert sorted(numbers(TokenSource(paths, end_token=END))) == list(range(1000))
    order = numbers(TokenSource(write_flat(tmp_path, DOCUMENTS), end_token=END, buffer_size=256))
    assert sorted(order) == list(range(1003))
    first_buffer = order[:256]
    assert max(first_buffer) - min(first_buffer) > 500  # runs from all over the file
    assert sum(after == before + 1 for before, after in itertools.pairwise(order)) < 20


# ---- flat arrays


@pytest.mark.parametrize(
    ("magic", "version", "dtype"), [(20240520, 1, np.uint16), (20240801, 7, np.uint32)], ids=["gpt2", "llama3"]
)
def test_the_header_of_llm_c(tmp_path, magic, version, dtype):
    path = write_llm_c(tmp_path, DOCUMENTS, magic=magic, version=version, dtype=dtype)
    source = TokenSource(path, end_token=END, shuffle=False)
    assert same(source, DOCUMENTS)
    assert next(iter(source)).dtype == dtype
    with pytest.raises(ValueError, match="dtype"):
        TokenSource(path, end_token=END, dtype=np.int64)


def test_documents_that_begin_with_a_token(tmp_path):
    """The last document of a file may go on in the next one, so a file may begin in the middle of one."""
    moved = [np.roll(document, 1) for document in DOCUMENTS]
    tokens = [np.array([300, 301], np.uint16), *moved]
    source = TokenSource(write_llm_c(tmp_path, tokens), start_token=END, shuffle=False)
    assert same(source, tokens)


def test_settings_that_do_not_fit(tmp_path):
    path = tmp_path / "a.bin"
    np.arange(30, dtype=np.uint16).tofile(path)
    for paths, settings, named in (
        *((path, {"document_ends": each}, "document_ends") for each in ([3, 2, 30], [-1, 30], [3, 29], [3, 31], [])),
        *((path, {"document_ends": each}, "document_ends") for each in ([3.5, 30], [[3, 30]])),
        ([path, path], {"end_token": END}, "paths"),
        ([path], {"document_ends": [[30], [30]]}, "document_ends"),
        (path, {}, "end_token"),
        (path, {"end_token": 1, "start_token": 1}, "end_token"),
        (path, {"end_token": 1, "document_ends": [30]}, "end_token"),
    ):
        with pytest.raises((TypeError, ValueError), match=named):
            TokenSource(paths, **settings)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", ">u4", "uint64"])
def test_dtypes(tmp_path, dtype):
    made = [np.array([2 + number % 100, 200, 1], dtype) for number in range(300)]
    source = TokenSource(write_flat(tmp_path, made), end_token=1, dtype=dtype, shuffle=False)
    assert same(source, made)
    assert PackedCollator()(list(source))["input_ids"].shape == (1, 900)
    if dtype not in (">u4", "uint64"):  # Megatron's index has no codes for these
        source = MegatronSource(write_megatron(tmp_path, made), shuffle=False)
        assert same(source, made)
        assert next(iter(source)).dtype == dtype


@pytest.mark.parametrize("as_file", [True, False])
def test_given_ends(tmp_path, as_file):
    made = [DOCUMENTS[0], DOCUMENTS[0][:0], *DOCUMENTS[1:]]  # a document may be empty
    np.save(tmp_path / "ends.npy", ends(made).astype(np.uint32))
    given = tmp_path / "ends.npy" if as_file else ends(made).tolist()
    source = TokenSource(write_npy(tmp_path, made), document_ends=given, shuffle=False)
    assert same(source, made)
    (tmp_path / "other").mkdir()
    paths = [write_npy(folder, made) for folder in (tmp_path, tmp_path / "other")]
    two = TokenSource(paths, document_ends=[given, given])
    assert len(two.lengths()) == 2 * len(made)


# ---- the lengths of documents are kept


@pytest.fixture
def search(monkeypatch):
    """Counts its calls."""
    monkeypatch.setattr(document_ends, "_search", mock.Mock(wraps=document_ends._search))
    return document_ends._search


@pytest.mark.parametrize("beside", [True, False])
def test_documents_are_searched_once(tmp_path, search, beside):
    """Files of one name may share a folder of indices."""
    folder = None if beside else tmp_path / "index"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = write_flat(tmp_path / name, DOCUMENTS)
        for token in (END, END, DOCUMENTS[0][0], DOCUMENTS[0][0]):
            TokenSource(path, end_token=token, index_folder=folder)
        assert len(list((folder or path.parent).glob("*train*.npz"))) == (4 if folder and name == "b" else 2)
    assert search.call_count == 4
    with pytest.raises(OSError, match=str(path)):
        TokenSource(path, end_token=END, index_folder=path)  # is no folder


def with_another_compression(content):
    place = content.index(b"PK\x01\x02") + 10
    return content[:place] + b"\x63" + content[place + 1 :]


def test_a_damaged_index_and_one_of_a_changed_file_are_made_again(tmp_path, search, monkeypatch):
    monkeypatch.setattr(document_ends, "_TOKENS_PER_READ", 101)
    for number, made in enumerate((DOCUMENTS, DOCUMENTS[:500], DOCUMENTS[:500][::-1])):
        path = write_flat(tmp_path, made)
        os.utime(path, ns=(number, number))
        assert same(TokenSource(path, end_token=END, shuffle=False), made)
        assert search.call_count == number + 1
    (index,) = tmp_path.glob("*.npz")
    for damage in (lambda content: content[:-30], lambda _: b"", lambda _: b"junk", with_another_compression):
        search.reset_mock()
        index.write_bytes(damage(index.read_bytes()))
        assert same(TokenSource(path, end_token=END, shuffle=False), made)
        assert search.call_count == 1


def test_an_index_and_ends_at_urls(monkeypatch, tmp_path, search):
    path, place = write_flat(tmp_path, DOCUMENTS), check_location("place", f"memory://{tmp_path.name}")
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        TokenSource(path, end_token=END, index_folder=str(place / "index"))
    assert search.call_count == 1
    assert [index.name.partition("-")[2] for index in visible_files(place / "index")] == ["train.bin.end_token-7.npz"]
    np.save(tmp_path / "ends.npy", ends(DOCUMENTS))
    write_file(place / "ends.npy", (tmp_path / "ends.npy").read_bytes())
    for given, files in ((str(place / "ends.npy"), path), ([place / "ends.npy"], [path])):
        assert len(TokenSource(files, document_ends=given).lengths()) == len(DOCUMENTS)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ends.npy", "train.bin"]


# ---- Megatron


@pytest.mark.parametrize("sequences", [1, 3])
def test_paths_and_sequences_of_megatron(tmp_path, sequences):
    """A document may be several sequences. A multimodal index has a byte for each sequence at its end."""
    prefix = write_megatron(tmp_path, DOCUMENTS, sequences=sequences)
    for path in (prefix, prefix.with_suffix(".bin"), str(prefix.with_suffix(".idx"))):
        assert same(MegatronSource(path, shuffle=False), DOCUMENTS)
    with prefix.with_suffix(".idx").open("ab") as file:
        file.write(bytes(len(DOCUMENTS) * sequences))
    assert same(MegatronSource(prefix, shuffle=False), DOCUMENTS)


def test_a_data_set_that_is_named_twice(tmp_path):
    prefix = write_megatron(tmp_path, DOCUMENTS[:3])
    paths = sorted(prefix.parent.glob(f"{prefix.name}*"))
    with pytest.raises(ValueError, match="prefixes"):
        MegatronSource(paths)
    assert len(list(MegatronSource(paths[1:]))) == 3
