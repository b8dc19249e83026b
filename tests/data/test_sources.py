"""What every source promises, and what sequences and streams promise beside it."""

import json
import os
import pickle
import threading
from collections import Counter
from functools import partial
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

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
from .data_sets import FORMATS
from .made import Stream, through_json
from .token_files import documents, numbers

DOCUMENTS = documents(130)
NUMBERS = list(range(130))
#: The parts that ranks divide: files, row groups, or runs of neighbours. The last one may be smaller.
ITEMS_PER_PART = {"chunks": 50, "parquet": 50, "row groups": 26, "sequence": 1, "stream": 1}


def buffered(name, size):
    """The option that says how much a source reads at once."""
    if name in ("chunks", "parquet", "row groups"):
        return {"buffer_chunks": 1 + size % 4}
    return {} if name == "sequence" else {"buffer_size": size}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The path of the documents in each format, written when they are first needed."""
    written = {}

    def path_of(name, count=130):
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
    assert drawn(iter(make(seed=3, infinite=True)), 260) == first + second
    source = make(shuffle=False)
    assert numbers(source) == numbers(source) == NUMBERS


def test_items_are_the_documents_and_have_their_lengths(name, make):
    for item, document in zip(make(shuffle=False), DOCUMENTS, strict=True):
        np.testing.assert_array_equal(item, document)
    if name not in ("chunks", "stream"):  # lengths of these are not known
        assert make(rank=1, world_size=2).lengths().tolist() == [len(document) for document in DOCUMENTS]


def test_ranks_share_the_items_evenly(name, make):
    for world_size, shuffle in ((2, True), (3, False)):
        parts = [numbers(make(shuffle=shuffle, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert sorted(chain(*parts)) == NUMBERS
        counts = [-(-len(part) // ITEMS_PER_PART.get(name, 64)) for part in parts]
        assert max(counts) - min(counts) <= 1


class Reading(RuleBasedStateMachine):
    """A source that one rank reads, against lists of the items of each epoch.

    A place in them is an epoch, and how many of its items were served.
    """

    states = Bundle("states")

    def __init__(self, name, path):
        super().__init__()
        self.name, self.path = name, path

    @initialize(
        seed=st.integers(0, 2**40),
        rank=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
        buffer=st.integers(1, 90),
        shuffle=st.booleans(),
        infinite=st.booleans(),
        served=st.integers(0, 200),
    )
    def make(self, seed, rank, buffer, shuffle, infinite, served):
        self.infinite = infinite
        self.settings = {"seed": seed, "shuffle": shuffle, "rank": rank[0], "world_size": rank[1]}
        self.settings |= buffered(self.name, buffer)
        self.uninterrupted, self.epochs = self.opened(), []
        self.source, self.place = self.opened(infinite=infinite), (0, 0)
        self.iterator = iter(self.source)
        self.take(served)  # at most an epoch of a source that ends
        self.take(served % 30)

    def opened(self, **more):
        return FORMATS[self.name][1](self.path, **self.settings, **more)

    def epoch_of(self, number):
        while len(self.epochs) <= number:
            self.epochs.append(numbers(self.uninterrupted))
        return self.epochs[number]

    @rule(count=st.integers(1, 100))
    def take(self, count):
        for _ in range(count):
            epoch, served = self.place
            item = next(self.iterator, None)
            if served == len(self.epoch_of(epoch)):
                epoch, served = self.place = epoch + 1, 0
                if not self.infinite:
                    assert item is None
                    self.iterator = iter(self.source)
                    return
            assert numbers([item]) == self.epoch_of(epoch)[served : served + 1]
            self.place = epoch, served + 1

    @rule()
    def iterate_again(self):
        """The latest iterator goes on, and the others are invalid."""
        older, self.iterator = self.iterator, iter(self.source)
        with pytest.raises(RuntimeError, match="this iterator is invalid"):
            next(older)

    @rule(target=states)
    def save(self):
        written = json.dumps(self.source.state_dict())
        assert len(written) < 400
        return self.place, json.loads(written)

    @rule(saved=states, is_new=st.booleans())
    def load(self, saved, is_new):
        if is_new:
            self.source = self.opened(infinite=self.infinite)
            self.iterator = iter(self.source)
        self.place, state = saved
        self.source.load_state_dict(state)
        assert self.source.state_dict() == state
        self.iterate_again()

    @rule()
    def pickle(self):
        self.source = pickle.loads(pickle.dumps(self.source))
        self.iterator = iter(self.source)

    @rule()
    def go_on_in_another_process(self):
        self.load(self.save(), True)
        self.take(3)

    @invariant()
    def epochs_are_counted(self):
        assert self.source.epoch == self.place[0]


@pytest.mark.hypothesis  # more examples in the exhaustive tier
def test_resumes_at_any_item(name, paths):
    settings = examples(5, stateful_step_count=15, deadline=None)
    run_state_machine_as_test(partial(Reading, name, paths(name)), settings=settings)


def test_batches_of_ranks_whose_number_changes(make):
    """Two ranks go on as three, and then as one. Together they serve the batches of one rank."""

    def batches(rank, world_size):
        options = {"window": 40, "rank": rank, "world_size": world_size, "remainder": "empty"}
        return LengthBatchStream(make(), BatchPlanner(64, packed=True), **options)

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


def test_an_iterator_that_is_dropped_leaves_nothing_open(make):
    def opened():
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    list(make())  # pyarrow keeps its threads
    before = opened()
    source = make()
    iterator = iter(source)
    drawn(iterator, 10)
    del iterator
    assert all(now <= then for now, then in zip(opened(), before, strict=True))  # a thread may have ended since
    del source


def test_states_of_other_configurations(name, make, paths):
    others = [{"seed": 2}, {"shuffle": False}, {"rank": 1, "world_size": 2}, buffered(name, 71)]
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
            FORMATS[name][1](paths(name, 100), seed=1).load_state_dict(state)


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


def test_what_is_no_stream():
    with pytest.raises(TypeError, match="dataset must have state_dict and load_state_dict, got a list"):
        StreamSource([1])


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
