"""Samplers of a data set and streams of a source: epochs, progress, states, and arguments that do not fit.

Passes that end early, restarts and changes of ranks are in test_passes.py.
"""

import itertools
import json
import pickle
from functools import partial
from itertools import islice
from operator import itemgetter
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, LengthBatchStream, Piece, SequenceSource

from ..support.tiers import examples
from .made import ListSource, lengths_lists, taken, through_json

LENGTHS = np.random.default_rng(0).lognormal(3, 0.9, 700).astype(int).clip(0, 200)


def scheduler(*lengths, unit="step", duration, step_size=4):
    return SequenceLengthScheduler(*lengths, duration=duration, step_size=step_size, unit=unit)


RULES = {
    "budget": {"max_tokens": 512, "multiple_of": 8},
    "rows": {"batch_size": 7},
    "packed": {"max_tokens": 512, "packed": True},
    "split": {"max_tokens": 64, "too_long": "split"},
    "bucket": {"max_tokens": 512, "max_length": scheduler(16, 200, duration=40)},
    "cut": {"max_tokens": 512, "max_length": scheduler(16, 200, duration=9000, unit="token"), "warmup": "cut"},
}


def planner_of(rule):
    return BatchPlanner(**RULES[rule] if isinstance(rule, str) else rule)


def sampler(lengths=LENGTHS, rule="budget", **options):
    return LengthBatchSampler(lengths, planner_of(rule), **options)


def stream(lengths=LENGTHS, rule="budget", *, ends_with="next", **options):
    """Its items are (number, length)."""
    source = ListSource([*enumerate(map(int, lengths))], ends_with)
    return LengthBatchStream(source, planner_of(rule), **{"length": itemgetter(1), **options})


KINDS = {"sampler": sampler, "stream": stream, "ended stream": partial(stream, ends_with="end")}


@pytest.fixture(params=KINDS)
def make(request):
    return KINDS[request.param]


def numbers_of(batches):
    return [entry[0] if isinstance(entry, tuple) else entry for batch in batches for entry in batch]


rules = st.sampled_from(
    [
        {"max_tokens": 60},
        {"max_tokens": 64, "multiple_of": 8},
        {"batch_size": 3},
        {"max_tokens": 60, "packed": True},
        {"max_tokens": 10, "too_long": "split"},
        {"max_tokens": 10, "too_long": "truncate"},
        {"max_tokens": 12, "too_long": "split", "packed": True},
        {"max_tokens": 60, "max_length": scheduler(2, 40, duration=9)},
        {"max_tokens": 60, "max_length": scheduler(2, 40, duration=90, unit="token")},
        {"batch_size": 4, "max_length": scheduler(2, 40, duration=30, unit="sample")},
        {
            "max_tokens": 60,
            "packed": True,
            "max_length": scheduler(2, 40, duration=9),
            "warmup": "cut",
            "too_long": "split",
        },
    ]
)


@pytest.mark.parametrize("kind", KINDS)
@given(lengths=lengths_lists, rule=rules, window=st.integers(1, 50), whole=st.booleans(), seed=st.integers(0, 2**40))
@examples(30)
def test_an_epoch_holds_every_token_of_every_item_once(kind, lengths, rule, window, whole, seed):
    options = {"window": None if whole and kind == "sampler" else window, "seed": seed, "shuffle": seed % 4 > 0}
    batches = KINDS[kind](lengths, rule, **options)
    for _ in range(2):
        pieces = [[] for _ in lengths]
        for batch in batches:
            assert batch
            for entry in batch:
                piece = entry if isinstance(entry, Piece) else Piece(entry, 0, None)
                number = numbers_of([[piece.item]])[0]
                pieces[number].append((piece.start, lengths[number] if piece.length is None else piece.length))
        bound = rule["max_tokens"] if rule.get("too_long") == "truncate" else 40
        for length, found in zip(lengths, pieces, strict=True):
            starts, sizes = zip(*sorted(found), strict=True)
            assert starts.count(0) == 1
            assert list(itertools.accumulate(sizes, initial=0)) == [*starts, min(length, bound)]


def test_each_epoch_has_another_order(make):
    batches, again = make(window=100), make(window=100)
    first, second = list(batches), list(batches)
    assert first != second
    assert [list(again), list(again)] == [first, second]
    assert list(make(window=100, seed=1)) != first
    assert make is not sampler or batches.epoch == 2


def test_progress(make):
    batches = make(rule="packed", window=100)
    items = tokens = 0
    for count, batch in enumerate(batches, start=1):
        items, tokens = items + len(batch), tokens + int(LENGTHS[numbers_of([batch])].sum())
        share = items / 700 if make is sampler else 0
        assert batches.progress == (items, tokens, count, pytest.approx(share))
    list(batches)
    assert batches.progress == (1400, 2 * LENGTHS.sum(), batches.progress.batches, 2)
    batches = make(rule="split", rank=1, world_size=2, remainder="empty")
    list(batches)
    assert batches.progress[:2] == (700, LENGTHS.sum())  # items that are split count once, those of all ranks count
    batches = make([5] * 20, {"batch_size": 4}, rank=0, world_size=4)
    list(batches)
    assert batches.progress[:1] + batches.progress[3:] == (16, 1)  # the batch that is dropped does not count


@pytest.mark.parametrize("remainder", ["drop", "repeat", "empty"])
def test_a_schedule_in_steps_counts_the_steps_that_were_made(remainder):
    """20 items of 5 batches an epoch, for 4 ranks: 1 step an epoch if the rest is dropped, else 2."""
    schedule = SequenceLengthScheduler(1, 5, duration=8, step_size=1)
    rule = {"batch_size": 4, "max_length": schedule, "warmup": "cut"}
    batches = sampler([5] * 20, rule, rank=0, world_size=4, remainder=remainder)
    lengths = [max((piece.length for piece in batch), default=0) for _ in range(12) for batch in batches]
    assert len(lengths) == (12 if remainder == "drop" else 24)
    assert lengths[:5] == [schedule.seq_length_at(step) for step in range(5)]
    assert batches.progress.batches == 4 * len(lengths)


def test_no_items_and_too_few_batches_for_the_ranks(make):
    for remainder in ("drop", "repeat", "empty"):
        batches = make([], rank=1, world_size=2, remainder=remainder)
        assert list(batches) == list(batches) == []
    assert list(sampler([], infinite=True)) == []
    for rank in range(2):
        with pytest.raises(ValueError, match="remainder"):
            list(make([5], rank=rank, world_size=2))


def test_items_that_may_be_cut_are_pieces():
    batches = sampler([5, 3], {"max_tokens": 4, "too_long": "split"}, shuffle=False)
    assert list(batches) == [[Piece(0, 0, 4)], [Piece(1, 0, 3)], [Piece(0, 4, 1)]]
    assert list(sampler([4, 3], {"max_tokens": 8}, shuffle=False)) == [[0, 1]]
    assert list(stream([3])) == [[(0, 3)]]
    assert list(stream([70], "split", shuffle=False)) == [[Piece((0, 70), 0, 64)], [Piece((0, 70), 64, 6)]]


def test_an_order_without_shuffling_and_one_inside_windows(make):
    batches = make([3, 1, 2, 9, 8, 7], {"batch_size": 2}, window=3, shuffle=False)
    assert [numbers_of([batch]) for batch in batches] == [[0, 2], [1], [3, 4], [5]]
    longest = [max(LENGTHS[numbers_of([batch])]) for batch in islice(make(window=100, rule="rows"), 15)]
    assert longest != sorted(longest, reverse=True)


def test_set_epoch():
    """Starts the epoch, or goes on in it from a state that was just loaded."""
    batches, resumed = sampler(window=100), sampler(window=100)
    epochs = [list(batches) for _ in range(2)]
    batches.set_epoch(1)
    assert taken(batches, 5) == epochs[1][:5]
    resumed.load_state_dict(batches.state_dict())
    resumed.set_epoch(1)
    assert list(resumed) == epochs[1][5:]
    resumed.set_epoch(0)
    assert list(resumed) == epochs[0]
    batches.set_epoch(1)  # from its beginning: the five batches do not count
    assert list(batches) == epochs[1]
    assert batches.progress.items == 3 * len(LENGTHS)


def test_the_number_of_batches_of_a_sampler():
    for options in ({}, {"rank": 1, "world_size": 3}, {"rank": 1, "world_size": 3, "remainder": "repeat"}):
        batches = sampler(window=100, **options)
        for _ in range(2):
            assert len(batches) == len(list(batches))
    with pytest.raises(TypeError, match="infinite"):
        len(sampler(infinite=True))


@pytest.mark.parametrize("array", [np.array, torch.tensor])
def test_lengths_that_change_later(array):
    """The plan changed with the array of the caller."""
    lengths = array([5, 1, 4, 2, 3] * 8)
    changed, planned = (sampler(lengths, {"max_tokens": 10}, window=5) for _ in range(2))
    planned = list(planned)
    lengths[:] = 1
    assert list(changed) == planned


@pytest.mark.parametrize(
    ("named", "options"),
    [
        ("window", {"window": 0}),
        ("seed", {"seed": 1.5}),
        ("rank", {"rank": 2, "world_size": 2}),
        ("world_size", {"rank": 0}),
        ("remainder", {"remainder": "keep"}),
        ("item 233", {"lengths": [1] * 233 + [900]}),
        ("lengths", {"lengths": [1, -9]}),
    ],
)
def test_arguments_that_do_not_fit(make, named, options):
    with pytest.raises((TypeError, ValueError), match=named):
        list(make(**options))


# ---- states


@pytest.mark.parametrize("rule", ["budget", "packed", "cut"])
def test_a_restart_plans_and_reads_the_open_window_only(monkeypatch, rule):
    plan = mock.create_autospec(BatchPlanner.plan, side_effect=BatchPlanner.plan)
    monkeypatch.setattr(BatchPlanner, "plan", plan)
    items = [(number, 10) for number in range(9000)]
    for make in (sampler, stream):
        batches = make([10] * 9000, rule, window=500)
        taken(batches, 120)
        state = json.dumps(batches.state_dict())
        assert len(state) < 700
        source, again = ListSource(items), make([10] * 9000, rule, window=500)
        if make is stream:
            again = LengthBatchStream(source, batches.planner, length=itemgetter(1), window=500)
        plan.reset_mock()
        again.load_state_dict(json.loads(state))
        assert plan.call_count == source.reads == 0
        next(iter(again))
        assert 0 < sum(len(call.args[1]) for call in plan.mock_calls) < 1100
    assert source.reads <= 500 + 64
    assert source.position > 3000


@pytest.mark.parametrize(
    ("make", "rule", "named", "changed"),
    [
        (sampler, "budget", "seed", {"seed": 1}),
        (sampler, "budget", "window", {"window": 99}),
        (sampler, "budget", "num_items", {"lengths": LENGTHS[:-1]}),
        (sampler, "budget", "lengths", {"lengths": LENGTHS[::-1]}),
        (sampler, "budget", "max_tokens", {"rule": {**RULES["budget"], "max_tokens": 520, "max_length": 512}}),
        (sampler, "budget", "multiple_of", {"rule": {"max_tokens": 512}}),
        (sampler, "budget", "batch_size", {"rule": {**RULES["budget"], "batch_size": 9}}),
        (sampler, "budget", "max_length", {"rule": {**RULES["budget"], "max_length": 200}}),
        (sampler, "budget", "too_long", {"rule": {**RULES["budget"], "too_long": "split"}}),
        (stream, "bucket", "warmup", {"rule": {**RULES["bucket"], "warmup": "cut"}}),
        (stream, "bucket", "max_length", {"rule": {**RULES["bucket"], "max_length": scheduler(16, 200, duration=41)}}),
        (stream, "bucket", "world_size", {"rank": 0, "world_size": 2}),
    ],
)
def test_a_state_of_another_configuration(make, rule, named, changed):
    batches = make(rule=rule, window=100)
    taken(batches, 3)
    other = make(**{"rule": rule, "window": 100, **changed})
    before = other.state_dict()
    with pytest.raises(ValueError, match=f"configuration.* {named} "):
        other.load_state_dict(through_json(batches.state_dict()))
    assert other.state_dict() == before


def of_sequence(sequence=None, rule="budget", length=len, **order):
    sequence = [[number] * (1 + number % 50) for number in range(600)] if sequence is None else sequence
    return LengthBatchStream(SequenceSource(sequence, **order), planner_of(rule), length=length, window=100)


def test_a_state_of_another_source_is_refused_when_it_is_loaded():
    with pytest.raises(ValueError, match="seed"):
        of_sequence(seed=1).load_state_dict(of_sequence().state_dict())


def test_a_pickled_stream_goes_on():
    batches = of_sequence()
    iterator = iter(batches)
    head = [next(iterator) for _ in range(7)]
    assert head + list(pickle.loads(pickle.dumps(batches))) == list(of_sequence())


SCHEDULED = {"max_tokens": 512, "max_length": scheduler(8, 200, duration=600, step_size=8, unit="sample")}


@pytest.mark.parametrize("rule", ["budget", SCHEDULED])
def test_a_state_whose_open_window_is_another_one(make, rule):
    """It was resumed in the middle of another plan if only the number of items was the same."""
    batches = make(rule=rule, window=100)
    taken(batches, 9)
    state = through_json(batches.state_dict())
    assert state["yielded"] != state["window_start"]
    for count in ("items", "tokens", "batches"):
        changed, other, right = through_json(state), *(make(rule=rule, window=100) for _ in range(2))
        changed["yielded"][count] += 1
        other.load_state_dict(changed)
        for _ in range(2):
            with pytest.raises(ValueError, match="state_dict"):
                next(iter(other))
        assert other.state_dict() == changed
        for each in (other, right):
            each.load_state_dict(state)
        assert taken(other, 3) == taken(right, 3)


@pytest.mark.parametrize("lengths", [LENGTHS + 1, LENGTHS[:100]], ids=["longer", "fewer"])
def test_a_state_of_a_stream_of_other_items_or_lengths(lengths):
    batches, other = stream(window=100), stream(lengths, window=100)
    taken(batches, 20)
    other.load_state_dict(batches.state_dict())
    with pytest.raises(ValueError, match=r"must (yield|be of) the same items"):
        next(iter(other))


# ---- sources of streams, and lengths of their items


@pytest.mark.parametrize(("fails", "reload"), [("item", False), ("item", True), ("length", False)])
def test_what_fails_once(fails, reload):
    calls = dict.fromkeys(("item", "length"), 0)

    def call(kind):
        calls[kind] += 1
        if kind == fails and calls[kind] == 401:
            raise OSError("the disk")

    class Items(list):
        def __getitem__(self, index):
            call("item")
            return super().__getitem__(index)

    def length(item):
        call("length")
        return len(item)

    batches = of_sequence(Items([number] * (1 + number % 50) for number in range(600)), length=length)
    found = []
    while batches.progress.epochs == 0:
        try:
            found.extend(batches)
        except OSError:
            if reload:
                batches.load_state_dict(through_json(batches.state_dict()))
    assert sorted(item[0] for batch in found for item in batch) == list(range(600))
    assert max(len(batch) * max(map(len, batch)) for batch in found) <= 512


def test_sources_that_do_not_fit():
    with pytest.raises(ValueError, match="world_size"):
        of_sequence(rank=0, world_size=2)
    with pytest.raises(ValueError, match="infinite"):
        of_sequence(rule="bucket", infinite=True)
    of_sequence(rule="cut", infinite=True)


def test_lengths_of_numpy_and_torch_are_ints_and_floats_are_not():
    assert len(list(of_sequence([3, 3], length=np.int64))) == len(list(of_sequence([3, 3], length=torch.tensor))) == 1
    with pytest.raises(TypeError, match="float"):
        list(of_sequence([3], length=float))


@pytest.mark.parametrize(
    "make",
    [
        lambda ids: ids,
        np.array,
        torch.tensor,
        lambda ids: {"input_ids": ids},
        lambda ids: {"name": "a", "input_ids": torch.tensor(ids), "labels": ids},
        lambda ids: (ids, 7),
        lambda ids: [torch.tensor(ids), "a label"],
        lambda ids: ({"input_ids": ids}, 7),
        lambda ids: ["word"] * len(ids),
    ],
)
def test_the_default_length_is_that_of_the_tokens(make):
    """It was `len`, which counts the entries of a mapping or tuple, and the characters of a text."""
    items = [make([1] * 5), make([]), make([1] * 9)]
    (batch,) = LengthBatchStream(ListSource(items), BatchPlanner(99, too_long="truncate"), shuffle=False)
    assert [piece.length for piece in batch] == [9, 5, 0]
    assert SequenceSource(items).lengths().tolist() == [5, 0, 9]


@pytest.mark.parametrize(
    ("item", "error", "named"),
    [
        *((text, TypeError, "length") for text in ("abc", b"abc", ("abc", 3), {"input_ids": "abc"})),
        *(({"text": "abc"}, ValueError, "input_ids"), ({"input_ids": [[1, 2, 3]]}, ValueError, "input_ids")),
        ({"input_ids": torch.ones(1, 3)}, ValueError, "input_ids"),
    ],
)
def test_items_whose_tokens_are_not_known(item, error, named):
    for use in (
        lambda: next(iter(LengthBatchStream(ListSource([item]), BatchPlanner(9)))),
        SequenceSource([item]).lengths,
    ):
        with pytest.raises(error, match=named):
            use()
