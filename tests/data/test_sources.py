"""What every source promises, and what sequences and streams promise beside it."""

import json
import os
import pickle
import threading
from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels.data import (
    BatchPlanner,
    ChunkSource,
    LengthBatchStream,
    Order,
    SequenceSource,
    Source,
    StreamSource,
)

from ..support.tiers import examples
from .data_sets import FORMATS, INSTALLED, NEEDS
from .made import Stream, through_json
from .token_files import documents, need_mds, numbers

DOCUMENTS = documents(260, longest=10)
NUMBERS = list(range(260))
#: The parts that ranks divide: files, row groups, or runs of neighbours. The last one may be smaller.
ITEMS_PER_PART = {"chunks": 50, "parquet": 50, "row groups": 26, "sequence": 1, "stream": 1}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Of shards that are unpacked."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The path of the documents in each format, written when they are first needed."""
    written = {}

    def path_of(name, count=260):
        if NEEDS.get(name) == "streaming":
            need_mds()
        if (name, count) not in written:
            written[name, count] = FORMATS[name][0](tmp_path_factory.mktemp(name), DOCUMENTS[:count])
        return written[name, count]

    return path_of


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


@pytest.fixture
def make(name, paths):
    path = paths(name)
    return lambda **settings: FORMATS[name][1](path, **settings)


def drawn(iterator, count=None):
    return numbers(islice(iterator, count))


def test_epochs(make):
    """Every item once in each, in an order that the seed and the epoch determine."""
    source = make(seed=3)
    assert isinstance(source, Source)
    first, second = numbers(source), numbers(source)
    assert sorted(first) == sorted(second) == NUMBERS
    assert first != second != NUMBERS != first
    assert source.epoch == 2
    again = make(seed=3)
    assert (numbers(again), numbers(again)) == (first, second)
    assert numbers(make(seed=4)) != first
    assert drawn(iter(make(seed=3, infinite=True)), 520) == first + second
    source = make(shuffle=False)
    assert numbers(source) == numbers(source) == NUMBERS


def test_items_are_the_documents_and_have_their_lengths(name, make):
    for item, document in zip(make(shuffle=False), DOCUMENTS, strict=True):
        np.testing.assert_array_equal(item, document)
    if name not in ("chunks", "stream"):  # lengths of these are not known
        assert make(rank=1, world_size=2).lengths().tolist() == [len(document) for document in DOCUMENTS]


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_the_items_evenly(name, make, shuffle):
    for world_size in (2, 3, 5):
        parts = [numbers(make(shuffle=shuffle, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert sorted(chain(*parts)) == NUMBERS
        counts = [-(-len(part) // ITEMS_PER_PART.get(name, 64)) for part in parts]
        assert max(counts) - min(counts) <= 1


def test_resumes_at_every_item(make):
    """Into the third epoch, from states as they are written to a file."""
    source, restored = (make(seed=5, rank=1, world_size=2, infinite=True) for _ in range(2))
    states, seen = [source.state_dict()], []
    for item in islice(source, 320):
        seen.append(item)
        states.append(source.state_dict())
    assert source.epoch >= 2
    expected = numbers(seen)
    for position, state in enumerate(states[:-1]):
        written = json.dumps(state)
        assert len(written) < 400
        restored.load_state_dict(json.loads(written))
        assert restored.state_dict() == state
        assert drawn(iter(restored), 1) == expected[position : position + 1]


@examples(150, deadline=None)
@given(st.data())
def test_random_configurations(paths, data):
    """Each rank is stopped and restored at random places, and serves what it serves without a stop."""
    name, count = data.draw(st.sampled_from(INSTALLED)), data.draw(st.sampled_from([60, 150, 260]))
    world_size = data.draw(st.integers(1, count // 50))
    settings = {
        "seed": data.draw(st.integers(0, 2**40)),
        "shuffle": data.draw(st.booleans()),
        "rank": data.draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
    }
    if name in ("chunks", "parquet", "row groups"):
        settings["buffer_chunks"] = data.draw(st.integers(1, 7))
    elif name != "sequence":
        settings["buffer_size"] = data.draw(st.integers(1, 300))
    infinite = data.draw(st.booleans())

    def make():
        return FORMATS[name][1](paths(name, count), infinite=infinite, **settings)

    def served(source, count):
        found = []
        while len(found) < count:  # an epoch that ends is followed by the next one
            found += drawn(iter(source), count - len(found))
        return found

    stops = data.draw(st.lists(st.integers(0, 400), max_size=3).map(sorted))
    expected, found, source = served(make(), 500), [], make()
    for stop in [*stops, 500]:
        found += served(source, stop - len(found))
        state = through_json(source.state_dict())
        source = make()
        source.load_state_dict(state)
    assert found == expected


@pytest.mark.parametrize("packed", [True, False])
def test_batches_of_ranks_whose_number_changes(make, packed):
    """Two ranks go on as three, and then as one. Together they serve the batches of one rank."""

    def batches(rank, world_size):
        options = {"window": 40, "rank": rank, "world_size": world_size, "remainder": "empty"}
        return LengthBatchStream(make(), BatchPlanner(64, packed=packed), **options)

    served, state = [], batches(0, 1).state_dict()
    for world_size, steps in ((2, 3), (3, 4), (1, None)):
        ranks = [batches(rank, world_size) for rank in range(world_size)]
        for each in ranks:
            each.load_state_dict(state)
        served += chain.from_iterable(zip(*(islice(each, steps) for each in ranks), strict=True))
        state, *others = (through_json(each.state_dict()) for each in ranks)
        assert all(other == state for other in others)
    assert list(map(numbers, served)) == list(map(numbers, batches(0, 1)))
    assert sorted(numbers(chain.from_iterable(served))) == NUMBERS


def test_the_end_of_an_epoch(make):
    """The state after the last item, before and after the iterator has ended."""
    source = make()
    iterator = iter(source)
    drawn(iterator, len(DOCUMENTS))
    before_end = source.state_dict()
    assert list(iterator) == []
    after_end = source.state_dict()
    for state, expected in ((before_end, []), (after_end, numbers(source))):
        restored = make()
        restored.load_state_dict(state)
        assert numbers(restored) == expected


def test_the_latest_iterator_goes_on_and_the_others_are_invalid(make):
    source, expected = make(seed=2), numbers(make(seed=2))
    never_started, old = iter(source), iter(source)
    assert drawn(old, 100) == expected[:100]
    new = iter(source)
    assert drawn(new, 1) == expected[100:101]
    for invalid in (never_started, old):
        with pytest.raises(RuntimeError, match="this iterator is invalid"):
            next(invalid)
    assert numbers(new) == expected[101:]
    new = iter(source)
    next(new)
    source.load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match="this iterator is invalid"):
        next(new)


def test_a_pickled_source_goes_on(make):
    source = make()
    head = drawn(iter(source), 100)
    restored = pickle.loads(pickle.dumps(source))
    assert restored.state_dict() == source.state_dict()
    assert sorted(head + numbers(restored)) == NUMBERS


def test_an_iterator_that_is_dropped_leaves_nothing_open(make):
    def opened():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    list(make())  # pyarrow keeps its threads
    before = opened()
    source = make()
    iterator = iter(source)
    drawn(iterator, 10)
    del iterator
    assert opened() == before
    del source


def test_states_of_other_configurations(name, make, paths):
    buffer = {"sequence": {}, **{key: {"buffer_chunks": 2} for key in ("chunks", "parquet", "row groups")}}
    others = [{"seed": 2}, {"shuffle": False}, {"rank": 1, "world_size": 2}, buffer.get(name, {"buffer_size": 70})]
    state = make(seed=1).state_dict()
    for changed in filter(None, others):
        source = make(**{"seed": 1, **changed})
        before = source.state_dict()
        entry = next(iter(changed))
        with pytest.raises(ValueError, match=f"configuration.* {entry} "):
            source.load_state_dict(state)
        assert source.state_dict() == before
    for entry in state.keys() - {"epoch", "block", "position", "dataset"}:
        without = {key: value for key, value in state.items() if key != entry}
        with pytest.raises(ValueError, match=f"configuration: {entry} "):
            make(seed=1).load_state_dict(without)
    with pytest.raises(ValueError, match="source is 'other'"):
        make(seed=1).load_state_dict({**state, "source": "other"})
    if name != "stream":  # does not know its items
        with pytest.raises(ValueError, match=r"(files|length) is "):
            FORMATS[name][1](paths(name, 150), seed=1).load_state_dict(state)


def test_options_of_the_order(make):
    source = make(seed=np.int64(3), rank=np.int32(0), world_size=np.int64(2))
    assert through_json(source.state_dict()) == make(seed=3, rank=0, world_size=2).state_dict()
    for named, options in (
        ("rank", {"rank": 2, "world_size": 2}),
        ("world_size", {"world_size": 0}),
        ("seed", {"seed": -1}),
        ("infinity", {"infinity": True}),
    ):
        for call in (make, Order):
            with pytest.raises((TypeError, ValueError), match=named):
                call(**options)


@pytest.mark.filterwarnings("ignore:skipped")
def test_an_infinite_source_without_items_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"")
    for source in (
        ChunkSource([tmp_path / "a.txt"], infinite=True, on_error="skip"),
        SequenceSource([], infinite=True),
        StreamSource(Stream([]), infinite=True),
    ):
        with pytest.raises(ValueError, match=f"{type(source).__name__} must have items to be infinite"):
            next(iter(source))
    assert list(SequenceSource([])) == []


# ---- sequences


def test_frames_of_pandas_and_paths_are_no_sequences():
    """Frames are indexed by label: a frame would serve its columns. A path would serve its characters."""
    pandas = pytest.importorskip("pandas")
    for sequence in (pandas.DataFrame({0: [1, 2], 1: [3, 4]}), pandas.Series([1, 2, 3])[1:], "train.txt"):
        with pytest.raises(TypeError, match="sequence"):
            SequenceSource(sequence)


def test_lengths_of_a_sequence():
    items = [[7] * (number % 9) for number in range(600)]
    source = SequenceSource(items)
    expected = [number % 9 for number in range(600)]
    assert source.lengths().tolist() == source.lengths(len).tolist() == expected
    assert source.lengths(lambda item: np.int32(2 * len(item))).tolist() == [2 * length for length in expected]
    assert SequenceSource([]).lengths().dtype == np.int64
    with pytest.raises(ValueError, match="length"):
        source.lengths(lambda item: -1)


def test_arrays_and_datasets_that_read_many_items_at_once():
    assert sorted(SequenceSource(np.arange(10))) == list(range(10))

    class Dataset:
        calls = 0

        def __len__(self):
            return 600

        def __getitems__(self, numbers):
            self.calls += 1
            return [number * 2 for number in numbers]

    dataset = Dataset()
    assert sorted(SequenceSource(dataset)) == [number * 2 for number in range(600)]
    assert dataset.calls == 3


# ---- streams


def test_a_list_is_no_stream():
    with pytest.raises(TypeError, match="dataset"):
        StreamSource([1, 2, 3])


def test_restoring_a_stream_reads_the_open_buffer_only():
    source = StreamSource(Stream(range(1003)), buffer_size=100)
    iterator = iter(source)
    list(islice(iterator, 950))
    dataset = Stream(range(1003))
    restored = StreamSource(dataset, buffer_size=100)
    restored.load_state_dict(source.state_dict())
    assert next(iter(restored)) == next(iterator)
    assert dataset.read == list(range(900, 1000))


def test_a_stream_receives_the_epoch():
    class Rotated(Stream):
        def set_epoch(self, epoch):
            self.items = [*range(epoch, 300), *range(epoch)]

    source = StreamSource(Rotated(range(300)), shuffle=False)
    epochs = [list(source) for _ in range(3)]
    assert [epoch[0] for epoch in epochs] == [0, 1, 2]
    restored = StreamSource(Rotated(range(300)), shuffle=False)
    restored.load_state_dict({**source.state_dict(), "epoch": 1, "position": 5})
    assert list(restored) == epochs[1][5:]


def test_each_buffer_of_each_rank_has_its_own_order():
    orders = Counter()
    for rank in range(2):
        items = list(StreamSource(Stream(range(400)), buffer_size=100, rank=rank, world_size=2))
        orders.update(tuple(item // 2 % 50 for item in items[begin : begin + 50]) for begin in range(0, 200, 50))
    assert len(orders) == 8
