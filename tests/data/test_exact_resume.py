"""Sources of Parquet and MDS files resume exactly: random files, settings, ranks and moments."""

import shutil
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqwarm_kernels.data import MDSSource, ParquetSource, count_lengths

from .made import through_json
from .token_files import need_mds

EXAMPLES = [15, pytest.param(150, marks=pytest.mark.exhaustive)]


def document(number):
    """Its first tokens say the number."""
    return np.arange(number % 7, dtype=np.int32) * 1000 + number if number % 7 else np.array([number], np.int32)


def write_parquet(folder, counts, draw):
    """Files of `counts` rows, in row groups of any size, some without rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = draw(st.integers(1, 9))
    column = draw(st.sampled_from(["ids", ["ids"], ["ids", "labels"]]))
    for file, numbers in enumerate(split(counts)):
        ids = pa.array([document(number) for number in numbers], pa.list_(pa.int32()))
        columns = {"ids": ids, "labels": ids} if column == ["ids", "labels"] else {"ids": ids}
        pq.write_table(pa.table(columns), folder / f"{file}.parquet", row_group_size=rows)
    options = {"column": column, "buffer_chunks": draw(st.integers(1, 5)), "with_lengths": draw(st.booleans())}
    if draw(st.booleans()):
        count_lengths(folder, lambda item: 1, column)
    return sum(-(-count // rows) for count in counts), lambda **order: ParquetSource(folder, **options, **order)


def write_mds(folder, counts, draw):
    """Folders of shards of a few documents, some compressed, or with a merged index."""
    from streaming import MDSWriter
    from streaming.base.util import merge_index

    options = {"compression": draw(st.sampled_from([None, "zstd"])), "size_limit": draw(st.integers(100, 500))}
    for number, numbers in enumerate(split(counts)):
        out = str(folder / str(number))
        with MDSWriter(out=out, columns={"tokens": "bytes"}, hashes=[], **options) as writer:
            for each in numbers:
                writer.write({"tokens": document(each).tobytes()})
    folders = [folder / str(number) for number in range(len(counts))]
    if draw(st.booleans()):
        merge_index(str(folder), keep_local=True)
        folders = folder
    options = {"dtype": "int32", "buffer_size": draw(st.integers(1, 40))}
    return sum(counts), lambda **order: MDSSource(folders, **options, **order)


def split(counts):
    ends = np.cumsum(counts).tolist()
    return [range(end - count, end) for end, count in zip(ends, counts, strict=True)]


def number_of(item):
    item = item[0] if isinstance(item, tuple) else item
    return int((item["ids"] if isinstance(item, dict) else item)[0])


def served(source, count):
    """The next items, over all epochs."""
    passes = iter(lambda: source, None) if not source.infinite else [source]
    return list(islice(chain.from_iterable(map(iter, passes)), count))


@pytest.mark.parametrize("examples", EXAMPLES)
@pytest.mark.parametrize("write", [write_parquet, write_mds], ids=["parquet", "mds"])
def test_a_restart_at_any_moment_changes_nothing(tmp_path_factory, monkeypatch, write, examples):
    pytest.importorskip("pyarrow") if write is write_parquet else need_mds()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))

    @settings(max_examples=examples)
    @given(st.data())
    def explored(data):
        folder = tmp_path_factory.mktemp("data")
        counts = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
        parts, make = write(folder, counts, data.draw)
        world_size = data.draw(st.integers(1, min(parts, 8)))
        order = {"seed": data.draw(st.integers(0, 3)), "shuffle": data.draw(st.booleans())}
        order |= {"infinite": data.draw(st.booleans()), "world_size": world_size}
        epochs = [[*map(number_of, make(rank=rank, **{**order, "infinite": False}))] for rank in range(world_size)]
        assert sorted(chain.from_iterable(epochs)) == list(range(sum(counts)))
        rank = data.draw(st.integers(0, world_size - 1))
        count = 3 * len(epochs[rank]) + 1
        expected = [*map(number_of, served(make(rank=rank, **order), count))]
        assert expected[: len(epochs[rank])] == epochs[rank]
        found = []
        source = make(rank=rank, **order)
        for stop in sorted(data.draw(st.lists(st.integers(0, count), max_size=3))):
            found += map(number_of, served(source, stop - len(found)))
            state = through_json(source.state_dict())
            source = make(rank=rank, **order)
            source.load_state_dict(state)
        assert [*found, *map(number_of, served(source, count - len(found)))] == expected
        shutil.rmtree(folder)

    explored()
