"""Batches of a stream: windows, ranks, and restarts that do not read served windows again."""

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
    lengths_lists,
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


def test_an_empty_stream():
    for remainder in ("drop", "repeat", "empty"):
        batches = stream([], rank=0, world_size=2, remainder=remainder)
        assert list(batches) == []
        assert list(batches) == []


def test_a_path_is_no_sequence():
    """With a `length`, training ran on its characters."""
    with pytest.raises(TypeError, match="sequence"):
        SequenceSource("train.txt")


def test_items_are_not_compared():
    """Arrays have no truth value, so comparing items would raise."""
    items = [np.arange(n) for n in (3, 1, 2)]
    (batch,) = LengthBatchStream(ListSource(items), BatchPlanner(batch_size=3))
    assert [len(item) for item in batch] == [3, 2, 1]


def test_the_error_names_the_position_of_a_long_item():
    items = [(number, 10) for number in range(300)]
    items[233] = (233, 600)
    with pytest.raises(ValueError, match="item 233"):
        list(stream(items))


def test_invalid_lengths():
    with pytest.raises(TypeError, match="float"):
        list(stream([(0, 1.5)]))
    for rule in ("budget", "packed", "cut", "bucket"):
        with pytest.raises(ValueError, match="lengths"):
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
        with pytest.raises(TypeError, match="length"):
            next(iter(LengthBatchStream(ListSource([item]), BatchPlanner(9))))
        with pytest.raises(TypeError, match="length"):
            SequenceSource([item]).lengths()

    @pytest.mark.parametrize("item", [{"text": "abc"}, {"input_ids": torch.ones(1, 3)}, {"input_ids": [[1, 2, 3]]}])
    def test_mappings_whose_tokens_are_not_known(self, item):
        with pytest.raises(ValueError, match="input_ids"):
            next(iter(LengthBatchStream(ListSource([item]), BatchPlanner(9))))


def test_a_state_of_another_configuration():
    state = stream(rule="bucket").state_dict()
    slower = SequenceLengthScheduler(16, 200, duration=41, step_size=16)
    for name, changed, ranks in (
        ("max_tokens", {"max_tokens": 600}, {}),
        ("warmup", {"warmup": "cut"}, {}),
        ("max_length", {"max_length": slower}, {}),
        ("world_size", {}, {"rank": 0, "world_size": 2}),
    ):
        with pytest.raises(ValueError, match=f"configuration.* {name} "):
            stream(rule={**RULES["bucket"], **changed}, **ranks).load_state_dict(state)


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
