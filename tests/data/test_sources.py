import json
import pickle
import random
from collections import Counter

import numpy as np
import pytest

from seqwarm_kernels.data import PaddedCollator, PieceDataset, Prepare
from seqwarm_kernels.data.sources.base import Source
from seqwarm_kernels.data.sources.chunk_source import ChunkSource
from seqwarm_kernels.data.sources.sequence_source import SequenceSource
from seqwarm_kernels.data.sources.stream_source import StreamSource
from seqwarm_kernels.data.sources.token_source import TokenSource

from .made import TEXTS as ITEMS
from .made import Stream


class TextsOfTokens(TokenSource):
    """Lines of text as documents: a byte is a token."""

    def _read(self, runs):
        return [item.tobytes().decode().rstrip("\n") for item in super()._read(runs)]


@pytest.fixture(params=["chunks", "sequence", "stream", "tokens"])
def make(request, folder, tmp_path):
    (tmp_path / "lines.txt").write_text("".join(f"{item}\n" for item in ITEMS))

    def make(**settings):
        if request.param == "chunks":
            return ChunkSource(folder, buffer_chunks=3, **settings)
        if request.param == "sequence":
            return SequenceSource(ITEMS, **settings)
        if request.param == "tokens":
            return TextsOfTokens(
                tmp_path / "lines.txt", end_token=ord("\n"), dtype="uint8", buffer_size=128, **settings
            )
        return StreamSource(Stream(ITEMS), buffer_size=128, **settings)

    return make


def test_sources_implement_the_protocol(make):
    assert isinstance(make(), Source)


def test_an_epoch_has_every_item_once_in_its_own_order(make):
    source = make(seed=3)
    first, second = list(source), list(source)
    assert sorted(first) == sorted(second) == sorted(ITEMS)
    assert first != second != ITEMS != first
    assert (source.epoch, source.items) == (2, 2006)
    again = make(seed=3)
    assert (list(again), list(again)) == (first, second)
    assert list(make(seed=4)) != first


def test_without_shuffling_the_order_is_the_given_one(make):
    source = make(shuffle=False)
    assert list(source) == ITEMS
    assert list(source) == ITEMS


def test_an_infinite_source_repeats_epochs(make):
    finite, infinite = make(seed=1), iter(make(seed=1, infinite=True))
    expected = [item for _ in range(3) for item in finite]
    assert [next(infinite) for _ in range(3009)] == expected


@pytest.mark.parametrize("shuffle", [True, False])
def test_ranks_share_the_items(make, shuffle):
    for world_size in (2, 3, 7):
        parts = [list(make(shuffle=shuffle, rank=rank, world_size=world_size)) for rank in range(world_size)]
        assert Counter(item for part in parts for item in part) == Counter(ITEMS)
        sizes = [len(part) for part in parts]
        if isinstance(make(), ChunkSource):  # split by files: 10 of 100 items, one of 3
            sizes = [-(-size // 100) for size in sizes]
        if isinstance(make(), TokenSource):  # split by runs of 64 items
            sizes = [-(-size // 64) for size in sizes]
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("shuffle", "rank", "world_size"), [(True, 0, 1), (False, 0, 1), (True, 1, 3)])
def test_resumes_from_any_position(make, shuffle, rank, world_size):
    """At 20 random positions of three epochs, with the state encoded as JSON."""
    settings = {"seed": 5, "shuffle": shuffle, "rank": rank, "world_size": world_size, "infinite": True}
    uninterrupted = iter(make(**settings))
    expected = [next(uninterrupted) for _ in range(3 * len(ITEMS) // world_size)]
    positions = random.Random(0).sample(range(len(expected)), 18)
    for position in [0, 1, *positions]:
        source = make(**settings)
        iterator = iter(source)
        assert [next(iterator) for _ in range(position)] == expected[:position]
        state = json.loads(json.dumps(source.state_dict()))
        restored = make(**settings)
        restored.load_state_dict(state)
        assert restored.state_dict() == state
        iterator = iter(restored)
        assert [next(iterator) for _ in expected[position:]] == expected[position:]
        assert restored.items == len(expected)


def test_resumes_at_the_end_of_an_epoch(make):
    """The state after the last item, before and after the iterator has ended."""
    source = make()
    iterator = iter(source)
    first = [next(iterator) for _ in ITEMS]
    before_end = source.state_dict()
    assert list(iterator) == []
    after_end = source.state_dict()
    second = list(source)
    assert sorted(first) == sorted(second)
    for state, expected in ((before_end, []), (after_end, second)):
        restored = make()
        restored.load_state_dict(state)
        assert list(restored) == expected


def test_a_new_iterator_continues_and_invalidates_the_old_one(make):
    source = make(seed=2)
    expected = list(make(seed=2))
    old = iter(source)
    assert [next(old) for _ in range(300)] == expected[:300]
    assert list(source) == expected[300:]
    with pytest.raises(RuntimeError, match="this iterator is invalid"):
        next(old)
    old = iter(source)
    next(old)
    source.load_state_dict(source.state_dict())
    with pytest.raises(RuntimeError, match="this iterator is invalid"):
        next(old)


def test_an_old_iterator_that_never_started_changes_nothing(make):
    source = make(seed=2)
    expected = list(make(seed=2))
    old, new = iter(source), iter(source)
    assert next(new) == expected[0]
    with pytest.raises(RuntimeError, match="this iterator is invalid"):
        next(old)
    assert list(new) == expected[1:]


def test_a_pickled_source_holds_no_items_and_continues():
    source = SequenceSource(range(600), seed=2)
    iterator = iter(source)
    head = [next(iterator) for _ in range(300)]
    pickled = pickle.dumps(source)
    restored = pickle.loads(pickled)
    assert len(pickled) < 1000
    assert (restored.items, restored.state_dict()) == (300, source.state_dict())
    assert sorted(head + list(restored)) == list(range(600))


def test_a_state_is_small_and_does_not_change(make):
    source = make(infinite=True)
    iterator = iter(source)
    for _ in range(500):
        next(iterator)
    state = source.state_dict()
    kept = pickle.loads(pickle.dumps(state))
    for _ in range(1000):
        next(iterator)
    assert state == kept
    assert len(json.dumps(state)) < 400
    assert "item 3" not in json.dumps(state)


def test_states_of_other_configurations_are_rejected(make):
    state = make(seed=1).state_dict()
    for settings, message in [
        ({"seed": 2}, "seed is 1 in the state, 2 here"),
        ({"seed": 1, "shuffle": False}, "shuffle is True in the state, False here"),
        ({"seed": 1, "rank": 1, "world_size": 2}, "rank is 0 in the state, 1 here"),
    ]:
        source = make(**settings)
        before = source.state_dict()
        with pytest.raises(ValueError, match=f"of another configuration: {message}"):
            source.load_state_dict(state)
        assert source.state_dict() == before
    with pytest.raises(ValueError, match="source is 'other' in the state"):
        make(seed=1).load_state_dict({**state, "source": "other"})


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"seed": -1}, ValueError, "seed must be at least 0, got -1"),
        ({"seed": 1.0}, TypeError, "seed must be an int, got float"),
        ({"rank": 2, "world_size": 2}, ValueError, "rank must be below world_size 2, got 2"),
        ({"world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
    ],
)
def test_bad_settings(make, settings, error, message):
    with pytest.raises(error, match=message):
        make(**settings)


def test_restoring_a_stream_reads_the_open_buffer_only():
    source = StreamSource(Stream(ITEMS), buffer_size=100)
    iterator = iter(source)
    for _ in range(950):
        next(iterator)
    dataset = Stream(ITEMS)
    restored = StreamSource(dataset, buffer_size=100)
    restored.load_state_dict(source.state_dict())
    assert next(iter(restored)) == next(iterator)
    assert dataset.read == list(range(900, 1000))


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


@pytest.mark.parametrize("sequence", [{1: 2}, "text", iter([1]), 3, {1, 2}])
def test_invalid_sequences(sequence):
    with pytest.raises(TypeError, match=rf"sequence must have len\(\) .* got {type(sequence).__name__}"):
        SequenceSource(sequence)


class Series(list):
    """What tells an object of pandas."""

    iloc = None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (SequenceSource, "sequence"),
        (PieceDataset, "dataset"),
        (lambda dataset: Prepare(PaddedCollator(), dataset=dataset), "dataset"),
    ],
)
def test_objects_that_are_indexed_by_label(make, name):
    message = rf"{name} must be indexed by position, got a Series of pandas, .* as frame\['text'\]\.tolist\(\)"
    with pytest.raises(TypeError, match=message):
        make(Series(["a"]))


def test_lengths_of_a_sequence():
    source = SequenceSource(ITEMS, rank=1, world_size=2)
    assert source.lengths(len).tolist() == list(map(len, ITEMS))
    assert source.lengths(lambda item: np.int32(2 * len(item))).tolist() == [2 * len(item) for item in ITEMS]
    assert SequenceSource([]).lengths().dtype == np.int64
    with pytest.raises(TypeError, match="length must be a function of an item, got int"):
        source.lengths(5)
    with pytest.raises(ValueError, match=r"length must return an int from 0 to \d+, got -1 for 'item 0'"):
        source.lengths(lambda item: -1)


def test_arrays_and_datasets_that_read_many_items_at_once():
    assert sorted(SequenceSource(np.arange(10))) == list(range(10))

    class Dataset:
        calls = 0

        def __len__(self):
            return 600

        def __getitem__(self, number):
            raise AssertionError("items must be read in blocks")

        def __getitems__(self, numbers):
            self.calls += 1
            return [number * 2 for number in numbers]

    dataset = Dataset()
    assert sorted(SequenceSource(dataset)) == [number * 2 for number in range(600)]
    assert dataset.calls == 3


def test_a_stream_receives_the_epoch():
    class Rotated(Stream):
        def set_epoch(self, epoch):
            self.items = ITEMS[epoch:] + ITEMS[:epoch]

    source = StreamSource(Rotated(ITEMS), shuffle=False)
    epochs = [list(source) for _ in range(3)]
    assert [epoch[0] for epoch in epochs] == ITEMS[:3]
    restored = StreamSource(Rotated(ITEMS), shuffle=False)
    restored.load_state_dict({**source.state_dict(), "epoch": 1, "position": 5})
    assert list(restored) == epochs[1][5:]


def test_each_buffer_has_its_own_order():
    """The orders inside the buffers differ."""
    items = list(StreamSource(Stream(range(300)), buffer_size=100))
    orders = [[item % 100 for item in items[begin : begin + 100]] for begin in (0, 100, 200)]
    assert orders[0] != orders[1] != orders[2] != orders[0]


def test_a_shuffle_buffer_is_rejected():
    class BufferShuffledExamplesIterable:
        buffer_size, ex_iterable = 1000, None

    class Wrapping:
        ex_iterable = BufferShuffledExamplesIterable()

    dataset = Stream([1, 2])
    dataset._ex_iterable = Wrapping()
    with pytest.raises(ValueError, match="dataset must not have a shuffle buffer"):
        StreamSource(dataset)
    BufferShuffledExamplesIterable.buffer_size = 1
    assert sorted(StreamSource(dataset)) == [1, 2]
