"""Processes that are killed: readers serve each document once, writers leave whole files."""

import functools
import json
import multiprocessing
import os

import numpy as np
import pytest

from seqwarm_kernels.data import visible_files, write_chunks
from seqwarm_kernels.utils.files import write_atomically

from ..support.kills import KILLS, assert_kills_change_nothing
from ..support.tiers import first_fast
from .data_sets import FORMATS
from .token_files import documents, numbers

FORK = multiprocessing.get_context("fork")
EPOCHS = 2
SAVED_AFTER = 17  #: items; few states are saved, so that most kills hit the reading. No size of a chunk is a multiple.
DOCUMENTS = documents(600, longest=10)


# ---- kills


def read(name, path, folder):
    """Read the epochs of a source, or the rest of them. The state is saved now and then."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")  # of shards that are unpacked
    source = FORMATS[name][1](path, seed=3)
    progress, seen = folder / "progress.json", []
    if progress.exists():
        saved = json.loads(progress.read_bytes())
        source.load_state_dict(saved["state"])
        seen = saved["seen"]
    while source.epoch < EPOCHS:
        for item in source:
            seen.append(np.asarray(item).tolist())
            if len(seen) % SAVED_AFTER == 0:
                write_atomically(progress, json.dumps({"seen": seen, "state": source.state_dict()}).encode())
    write_atomically(folder / "seen.json", json.dumps(seen).encode())


def assert_same_items(one, other):
    seen = [json.loads((folder / "seen.json").read_bytes()) for folder in (one, other)]
    assert seen[0] == seen[1]
    first, second = seen[0][: len(seen[0]) // 2], seen[0][len(seen[0]) // 2 :]
    assert sorted(first) == sorted(second) != first != second
    assert sorted(numbers(first)) == list(range(len(DOCUMENTS)))


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("name", first_fast(["chunks", "parquet", "flat", "zipped mds", "stream"]))
def test_kills(tmp_path, name, kills):
    use = functools.partial(read, name, FORMATS[name][0](tmp_path, DOCUMENTS))
    assert_kills_change_nothing(tmp_path, use, assert_same_items, kills=kills, context=FORK)


TEXTS = [f"text {number} " * (number % 9) + "." for number in range(600)]


def write(format, place, folder):
    """Write chunks, or go on with it."""
    write_chunks(TEXTS, place / folder.name, 100, length_fn=len, progress=False, format=format)


def assert_same_files(place, one, other):
    first, second = place / one.name, place / other.name
    names = [path.name for path in visible_files(first)]
    assert names == [path.name for path in visible_files(second)]
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize(
    ("format", "place"), first_fast([("text", "local"), ("text", "s3"), ("parquet", "local")]), indirect=["place"]
)
def test_kills_of_writers(tmp_path, format, place, kills):
    """A killed process leaves no file that is not whole, and the next one ends with the same files."""
    if format == "parquet":
        pytest.importorskip("pyarrow")
    use, compare = functools.partial(write, format, place), functools.partial(assert_same_files, place)
    assert_kills_change_nothing(tmp_path, use, compare, kills=kills, context=FORK)
