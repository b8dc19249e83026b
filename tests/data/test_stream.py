"""Batches of a stream: windows, ranks, and restarts that do not read served windows again."""

import json
import re
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchStream,
    Piece,
)
from seqwarm_kernels.data.sources.sequence_source import SequenceSource

from .made import (
    ListSource,
    first_batches,
    items_of,
    lengths_lists,
    served_with_restart,
    through_json,
)

#: Items (number, length). Numbers are unique.
ITEMS = list(enumerate(np.random.default_rng(1).lognormal(3, 0.9, 700).astype(int).clip(0, 200).tolist()))

RULES = {
    "budget": {"max_tokens": 512, "multiple_of": 8},
    "rows": {"batch_size": 7},
    "packed": {"max_tokens": 512, "packed": True},
    "split": {"max_tokens": 64, "too_long": "split"},
    "bucket": {"max_tokens": 512, "max_length": SequenceLengthScheduler(16, 200, duration=40, step_size=16)},
    "cut": {
        "max_tokens": 512,
        "max_length": SequenceLengthScheduler(16, 200, duration=9000, step_size=16, unit="token"),
        "warmup": "cut",
    },
}


def length_of(item):
    return item[1]


def stream(items=ITEMS, rule="budget", ends_with="next", **options):
    planner = BatchPlanner(**RULES[rule] if isinstance(rule, str) else rule)
    return LengthBatchStream(ListSource(items, ends_with), planner, **{"length": length_of, "window": 100, **options})


rules = st.sampled_from(
    [
        {"max_tokens": 60},
        {"batch_size": 3},
        {"max_tokens": 60, "packed": True},
        {"max_tokens": 10, "too_long": "split"},
        {"max_tokens": 60, "max_length": SequenceLengthScheduler(2, 40, duration=9, step_size=4)},
        {"max_tokens": 60, "max_length": SequenceLengthScheduler(2, 40, duration=90, step_size=4, unit="token")},
        {"batch_size": 4, "max_length": SequenceLengthScheduler(2, 40, duration=30, step_size=4, unit="sample")},
        {
            "max_tokens": 60,
            "packed": True,
            "max_length": SequenceLengthScheduler(2, 40, duration=9, step_size=4),
            "warmup": "cut",
            "too_long": "split",
        },
    ]
)


@given(lengths=lengths_lists, rule=rules, window=st.integers(1, 50), ends_with=st.sampled_from(["next", "end"]))
def test_an_epoch_holds_every_item_once(lengths, rule, window, ends_with):
    batches = stream(list(enumerate(lengths)), rule, ends_with, window=window)
    for _ in range(2):
        pieces = [entry if isinstance(entry, Piece) else Piece(entry, 0, entry[1]) for b in batches for entry in b]
        assert sum(piece.start == 0 for piece in pieces) == len(lengths)
        assert sorted({piece.item for piece in pieces}) == list(enumerate(lengths))
        assert sum(piece.length for piece in pieces) == sum(lengths)


@pytest.mark.parametrize("rule", ["budget", "packed", "cut"])
def test_a_restart_reads_the_open_window_and_nothing_before_it(rule):
    items = [(number, 10) for number in range(20_000)]
    batches = stream(items, rule, window=500)
    first_batches(batches, 170)
    state = through_json(batches.state_dict())
    source = ListSource(items)
    again = LengthBatchStream(source, batches.planner, length=length_of, window=500)
    again.load_state_dict(state)
    assert source.reads == 0
    next(iter(again))
    assert source.reads <= 500 + 64
    assert source.position > 5000


def test_a_state_is_small_and_the_same_size_anywhere():
    items = [(number, 10) for number in range(50_000)]
    sizes = []
    for at in (0, 3, 500, 900):
        batches = stream(items, window=500)
        first_batches(batches, at)
        sizes.append(len(json.dumps(batches.state_dict())))
    assert max(sizes) < 800
    assert "number" not in json.dumps(batches.state_dict())


def test_a_step_may_span_windows():
    """Windows of three batches for two ranks: batches are dropped only at the end of the epoch."""
    items = [(number, 10) for number in range(45)]
    by_rank = [list(stream(items, {"batch_size": 5}, window=15, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(batches) for batches in by_rank] == [4, 4]


def test_an_empty_stream():
    for remainder in ("drop", "repeat", "empty"):
        batches = stream([], rank=0, world_size=2, remainder=remainder)
        assert list(batches) == []
        assert list(batches) == []


def test_one_item():
    assert list(stream([(0, 3)])) == [[(0, 3)]]
    assert list(stream([(0, 3)], rank=1, world_size=2, remainder="empty")) == [[]]


def test_an_infinite_source():
    source = SequenceSource([list(range(n)) for n in range(1, 40)], infinite=True)
    batches = LengthBatchStream(source, BatchPlanner(64), window=30)
    assert sum(len(batch) for batch in islice(batches, 200)) > 300
    again = LengthBatchStream(
        SequenceSource([list(range(n)) for n in range(1, 40)], infinite=True), BatchPlanner(64), window=30
    )
    again.load_state_dict(through_json(batches.state_dict()))
    assert first_batches(again, 30) == first_batches(batches, 30)


def test_a_source_of_this_package():
    items = [[number] * (number % 37) for number in range(500)]
    batches = LengthBatchStream(SequenceSource(items, seed=3), BatchPlanner(128), window=64)
    for _ in range(2):
        assert sorted(items_of(batches)) == sorted(items)

    def make():
        return LengthBatchStream(SequenceSource(items, seed=3), BatchPlanner(128), window=64)

    uninterrupted = list(make())
    for at in (0, 1, 50, len(uninterrupted) - 1, len(uninterrupted)):
        assert served_with_restart(make, at)[: len(uninterrupted)] == uninterrupted


def test_a_path_is_no_sequence():
    """With a `length`, training ran on its characters."""
    with pytest.raises(TypeError, match="sequence must be indexed by position, got a str"):
        SequenceSource("train.txt")


def test_items_are_not_compared():
    """Arrays have no truth value, so comparing items would raise."""
    items = [np.arange(n) for n in (3, 1, 2)]
    (batch,) = LengthBatchStream(ListSource(items), BatchPlanner(batch_size=3))
    assert [len(item) for item in batch] == [3, 2, 1]


def test_the_error_names_the_position_of_a_long_item():
    items = [(number, 10) for number in range(300)]
    items[233] = (233, 600)
    with pytest.raises(ValueError, match=r"item 233 has 600 tokens, more than 512"):
        list(stream(items))


def test_invalid_lengths():
    with pytest.raises(TypeError, match="float"):
        list(stream([(0, 1.5)]))
    for rule in ("budget", "packed", "cut", "bucket"):
        with pytest.raises(ValueError, match="lengths must be at least 0, got -1"):
            list(stream([(0, 1), (1, 1), (2, -1)], rule))


def test_lengths_of_numpy_and_torch_are_ints():
    assert len(list(stream([(0, np.int64(3)), (1, torch.tensor(3))]))) == 1


def test_a_source_that_lost_items():
    batches = stream(window=100)
    first_batches(batches, 20)
    shorter = stream(ITEMS[:100], window=100)
    shorter.load_state_dict(batches.state_dict())
    with pytest.raises(ValueError, match=r"must yield the same items again|state_dict must be of the same items"):
        next(iter(shorter))


class TestDefaultLength:
    """It was `len`, which counts the entries of a mapping or tuple, and the characters of a text."""

    @staticmethod
    def lengths(items):
        (batch,) = LengthBatchStream(ListSource(items), BatchPlanner(99, too_long="truncate"), shuffle=False)
        assert sorted(SequenceSource(items).lengths()) == sorted(piece.length for piece in batch)
        return [piece.length for piece in batch]

    @pytest.mark.parametrize(
        "make",
        [
            lambda ids: ids,
            tuple,
            np.array,
            torch.tensor,
            lambda ids: {"input_ids": ids},
            lambda ids: {"name": "a", "input_ids": torch.tensor(ids), "labels": ids},
            lambda ids: (ids, 7),
            lambda ids: (np.array(ids), np.array(ids)),
            lambda ids: [torch.tensor(ids), "a label"],
            lambda ids: ({"input_ids": ids}, 7),
            lambda ids: ["word"] * len(ids),
        ],
    )
    def test_the_tokens_of_an_item(self, make):
        assert self.lengths([make([1] * 5), make([]), make([1] * 9)]) == [9, 5, 0]

    @pytest.mark.parametrize("item", ["abc", b"abc", ("abc", 3), {"input_ids": "abc"}])
    def test_text(self, item):
        message = r"length must be given for items of text, got b?'abc': a character is not a token; pass length=lambda"
        with pytest.raises(TypeError, match=message):
            next(iter(LengthBatchStream(ListSource([item]), BatchPlanner(9))))
        with pytest.raises(TypeError, match=message):
            SequenceSource([item]).lengths()

    @pytest.mark.parametrize(
        ("item", "message"),
        [
            ({"text": "abc"}, r"length must be given, or an item must have input_ids, got \['text'\]"),
            (
                {"input_ids": torch.ones(1, 3)},
                r"input_ids of an item must have one dimension, got shape \(1, 3\): squee",
            ),
            ({"input_ids": [[1, 2, 3]]}, "input_ids of an item must have one dimension, got a list of rows: squeeze"),
        ],
    )
    def test_mappings_whose_tokens_are_not_known(self, item, message):
        with pytest.raises(ValueError, match=message):
            next(iter(LengthBatchStream(ListSource([item]), BatchPlanner(9))))


def test_a_state_of_another_configuration():
    state = stream(rule="bucket").state_dict()
    with pytest.raises(ValueError, match=re.escape("max_tokens is 512 in the state, 600 here")):
        stream(rule={**RULES["bucket"], "max_tokens": 600}).load_state_dict(state)
    with pytest.raises(ValueError, match="of another configuration: warmup is 'bucket' in the state, 'cut' here"):
        stream(rule={**RULES["bucket"], "warmup": "cut"}).load_state_dict(state)
    slower = SequenceLengthScheduler(16, 200, duration=41, step_size=16)
    with pytest.raises(ValueError, match=r"max_length is .*'duration': 40.* in the state, .*'duration': 41.* here"):
        stream(rule={**RULES["bucket"], "max_length": slower}).load_state_dict(state)
    with pytest.raises(ValueError, match="world_size is 1 in the state, 2 here"):
        stream(rule="bucket", rank=0, world_size=2).load_state_dict(state)


class TestStreamOfOtherLengths:
    """A state was resumed in the middle of another plan if only the number of items was the same."""

    ITEMS = tuple([number] * (1 + number * 7 % 40) for number in range(200))

    def stream(self, length):
        return LengthBatchStream(ListSource(self.ITEMS), BatchPlanner(200), length=length, window=200)

    def test_it_is_refused(self):
        first = self.stream(len)
        first_batches(first, 8)
        state, other = first.state_dict(), self.stream(lambda item: len(item) + 1)
        other.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"must be of the same items and lengths"):
                next(iter(other))
        assert other.state_dict() == state
        other.load_state_dict(self.stream(len).state_dict())
        assert sum(map(len, other)) == 200
        again = self.stream(len)
        again.load_state_dict(state)
        assert list(again) == list(first)


def test_batches_have_items_or_pieces():
    assert list(stream([(0, 3)])) == [[(0, 3)]]
    assert list(stream([(0, 70)], rule="split", shuffle=False)) == [[Piece((0, 70), 0, 64)], [Piece((0, 70), 64, 6)]]
