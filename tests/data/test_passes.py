"""Passes that end early, go on, and are restarted from states on other ranks, against lists of all batches."""

from functools import cache
from importlib.util import find_spec
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    Piece,
    ResumableLoader,
    SequenceSource,
)

from ..support.tiers import examples, first_fast
from .made import ListSource, taken, through_json

ITEMS = [[number + 1] * (1 + number % 7) for number in range(60)]
KINDS = ("sampler", "infinite sampler", "stream", "infinite stream")
ENDED = "ended stream"  #: of a source whose state after an epoch is the end of it
RULES = {
    "budget": {"max_tokens": 16, "multiple_of": 2},
    "rows": {"batch_size": 3},
    "packed": {"max_tokens": 16, "packed": True},
    "split": {"max_tokens": 5, "too_long": "split"},
}


def batches_of(kind, planner=None, *, rank=0, world_size=1, source=None, **options):
    planner = planner or BatchPlanner(16)
    options = {"window": 20, "rank": rank, "world_size": world_size, **options}
    infinite = kind.startswith("infinite")
    if kind.endswith("sampler"):
        return LengthBatchSampler(list(map(len, ITEMS)), planner, seed=2, infinite=infinite, **options)
    source = source or (ListSource(ITEMS, "end") if kind == ENDED else SequenceSource(ITEMS, seed=2, infinite=infinite))
    return LengthBatchStream(source, planner, seed=2, **options)


def loader_with(batches, **workers):
    return ResumableLoader(DataLoader(ItemDataset(), batch_sampler=batches, collate_fn=list, **workers))


def torchdata_loader(batches, **workers):
    from seqwarm_kernels.data.torchdata_nodes import batch_loader

    return batch_loader(batches, list, **workers)


#: Make loaders whose batches are those of a sampler or stream: lists of indices, items or pieces.
LOADERS = [loader_with, torchdata_loader] if find_spec("torchdata") else [loader_with]


def loader_of(kind, planner=None, **options):
    return loader_with(batches_of(kind, planner, **options))


@cache
def all_batches(kind, epoch=0, rule=None, window=20):
    """The batches of an epoch, or the first ones of an infinite sequence of epochs, for one rank."""
    batches = batches_of(kind, rule and BatchPlanner(**RULES[rule]), window=window)
    if kind.startswith("infinite"):
        return taken(batches, 1500)
    return [taken(batches) for _ in range(epoch + 1)][-1]


class Passes(RuleBasedStateMachine):
    """A sampler or stream of one of several ranks, by itself or in a loader.

    The oracle is the list of all batches for one rank. A place in it is an epoch, the number of its batches that all
    ranks were served, and whether the next pass starts there.
    """

    states = Bundle("states")

    @initialize(
        kind=st.sampled_from([*KINDS, ENDED]),
        rule=st.sampled_from([*RULES]),
        window=st.sampled_from([4, 7, 20, 40]),  # lists of batches are kept
        remainder=st.sampled_from(["drop", "repeat", "empty"]),
        make_loader=st.sampled_from([None, *LOADERS]),
    )
    def make(self, kind, rule, window, remainder, make_loader):
        self.kind, self.rule, self.window, self.remainder, self.make_loader = kind, rule, window, remainder, make_loader
        self.place = self.previous = (0, 0, True)
        self.make_batches(1, 0)

    def make_batches(self, world_size, rank):
        self.rank, self.world_size = rank, world_size
        planner = BatchPlanner(**RULES[self.rule])
        options = {"window": self.window, "remainder": self.remainder, "rank": rank, "world_size": world_size}
        self.target = self.batches = batches_of(self.kind, planner, **options)
        if self.make_loader:
            self.target = self.make_loader(self.batches)
        self.iterator = self.cursor = None

    def all_batches(self, epoch):
        return all_batches(self.kind, epoch, self.rule, self.window)

    def left(self, epoch, served):
        """Number of batches of the next step for all ranks."""
        left = min(len(self.all_batches(epoch)) - served, self.world_size)
        return left if self.remainder != "drop" or left == self.world_size else 0

    def start_of_pass(self):
        epoch, served, is_start = self.place
        is_over = self.kind == "sampler" or (self.kind in ("stream", ENDED) and not self.left(epoch, served))
        return (epoch + 1, 0, True) if is_over and served and not is_start else (epoch, served, True)

    @rule()
    def start_pass(self):
        self.iterator, self.cursor = iter(self.target), None

    @precondition(lambda self: self.iterator is not None)
    @rule(count=st.integers(1, 9))
    def take(self, count):
        for _ in range(count):
            if self.cursor is None:  # an iterator starts with its first batch
                self.cursor = self.place = self.start_of_pass()
            epoch, served, _ = self.cursor
            batch, left = next(self.iterator, None), self.left(epoch, served)
            if not left:
                assert batch is None
                self.place = self.previous = (epoch + 1, 0, True)
                self.iterator = None
                return
            if self.rank < left:
                assert batch == self.all_batches(epoch)[served + self.rank]
            else:
                assert batch == [] if self.remainder == "empty" else batch in self.all_batches(epoch)
            self.previous = self.cursor
            self.cursor = self.place = (epoch, served + left, False)

    @precondition(lambda self: not self.kind.startswith("infinite"))
    @rule()
    def finish(self):
        if self.iterator is not None:
            self.take(100)

    @precondition(lambda self: not self.kind.startswith("infinite"))
    @rule(epoch=st.integers(0, 3), of_loader=st.booleans())
    def set_epoch(self, epoch, of_loader):
        (self.target if of_loader else self.batches).set_epoch(epoch)
        if self.kind == "sampler" and not (self.place[2] and epoch == self.place[0]):
            self.place = self.previous = (epoch, 0, True)

    @rule()
    def end_pass(self):
        self.target.end_pass()
        self.place = self.previous = self.start_of_pass()

    @rule(target=states, previous=st.booleans())
    def save(self, previous):
        if previous and self.make_loader:
            return self.previous, through_json(self.target.previous_state_dict())
        assert self.target.state_dict() == self.batches.state_dict()
        return self.place, through_json(self.target.state_dict())

    @rule(world_size=st.integers(1, 8), data=st.data())
    def restart_here(self, world_size, data):
        self.restart(self.save(False), world_size, data)
        self.start_pass()
        self.take(3)

    @rule(saved=states, world_size=st.integers(1, 8), data=st.data())
    def restart(self, saved, world_size, data):
        self.make_batches(world_size, data.draw(st.integers(0, world_size - 1)))
        self.load(saved, True)

    @rule(saved=states, of_loader=st.booleans())
    def load(self, saved, of_loader):
        (epoch, served, _), state = saved
        (self.target if of_loader else self.batches).load_state_dict(state)
        self.place = self.previous = (epoch, served, True)
        self.iterator = None

    @invariant()
    def progress_is_that_of_the_place(self):
        if self.kind.startswith("infinite"):
            return
        epoch, served, _ = self.place
        entries = chain.from_iterable(self.all_batches(epoch)[:served])
        items = sum(not isinstance(entry, Piece) or entry.start == 0 for entry in entries)
        share = items / len(ITEMS) if self.kind == "sampler" else 0
        assert self.target.progress.epochs == pytest.approx(epoch + share)


Passes.TestCase.settings = examples(12, stateful_step_count=20, deadline=None)
TestPasses = Passes.TestCase


WORKERS = [
    (loader_with, {"num_workers": 1, "persistent_workers": True}),
    (loader_with, {"num_workers": 2}),
    *([(torchdata_loader, {"num_workers": 2, "prefetch": 4})] if torchdata_loader in LOADERS else []),
]


@pytest.mark.parametrize(("make_loader", "workers"), [(lambda batches: batches, {}), *first_fast(WORKERS)])
@pytest.mark.parametrize("kind", ["sampler", "infinite stream"])
def test_passes_that_end_early(kind, make_loader, workers):
    """Batches that workers fetched and that were not yielded are in no pass, and those of an infinite loader next.

    A state may be loaded with another number of workers.
    """
    loader = make_loader(batches_of(kind), **workers)
    passes = [taken(loader, 6) for _ in range(2)]
    first = all_batches(kind)
    expected = [all_batches(kind, n)[:6] if kind == "sampler" else first[6 * n :][:6] for n in range(2)]
    assert passes == expected
    assert loader.progress[0] == sum(len(batch) for batches in passes for batch in batches)
    assert loader.progress[2] == 12
    restarted = loader_of(kind)
    restarted.load_state_dict(through_json(loader.state_dict()))
    assert taken(restarted, 2) == (all_batches(kind, 1)[6:8] if kind == "sampler" else first[12:14])


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_takes_exactly_all_batches_of_an_epoch(kind):
    """The end was not requested. The next pass is not empty."""
    loader, counts = loader_of(kind), [len(all_batches("sampler", epoch)) for epoch in range(2)]
    first, second = (taken(loader, count) for count in counts)
    if kind.startswith("infinite"):
        assert first + second == all_batches(kind)[: sum(counts)]
    else:
        assert [first, second] == [all_batches(kind, epoch) for epoch in range(2)]


def schedule(unit):
    return SequenceLengthScheduler(
        2, 7, duration={"step": 30, "token": 300, "sample": 80}[unit], step_size=1, unit=unit
    )


PLANNERS = {
    "cut by steps": lambda: BatchPlanner(16, max_length=schedule("step"), warmup="cut"),
    "packed pieces by tokens": lambda: BatchPlanner(
        16, max_length=schedule("token"), warmup="cut", packed=True, too_long="split"
    ),
    "buckets by tokens": lambda: BatchPlanner(16, max_length=schedule("token")),
    "buckets by samples": lambda: BatchPlanner(16, max_length=schedule("sample")),
}


@pytest.mark.parametrize("planner", PLANNERS)
@given(
    kind=st.sampled_from(KINDS),
    window=st.integers(3, 60),
    remainder=st.sampled_from(["drop", "repeat", "empty"]),
    ranks=st.sampled_from([(0, 1), (0, 2), (1, 2)]),
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=5),
    at=st.integers(0, 4),
    ends_pass=st.booleans(),
)
@examples(8, deadline=None)
def test_a_restart_serves_what_the_process_would_have(planner, kind, window, remainder, ranks, lengths, at, ends_pass):
    """Passes of some lengths, and a restart between two of them, or in the middle of one."""
    if kind == "infinite stream" and planner.startswith("buckets"):
        kind = "infinite sampler"

    def make():
        options = {"window": window, "remainder": remainder, "rank": ranks[0], "world_size": ranks[1]}
        return loader_of(kind, PLANNERS[planner](), **options)

    before, after = lengths[: at + 1], lengths[at + 1 :]
    loader, restarted = make(), make()
    for length in before:
        taken(loader, length)
    if ends_pass:
        loader.end_pass()
        restarted.load_state_dict(through_json(loader.state_dict()))
        assert [taken(restarted, length) for length in after] == [taken(loader, length) for length in after]
    else:
        batches = iter(loader)
        head = [batch for _, batch in zip(range(5), batches, strict=False)]
        restarted.load_state_dict(through_json(loader.state_dict()))
        if len(head) == 5:
            assert taken(restarted, 10) == taken(batches, 10)
    assert restarted.state_dict() == loader.state_dict()
    assert restarted.progress == loader.progress


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_the_random_stream(kind):
    """A DataLoader draws a seed for its workers when a pass starts. A restart in a pass draws none."""

    def train(loader, count):
        return [(batch, torch.rand(()).item()) for batch in islice(loader, count)]

    loader, restarted = loader_of(kind), loader_of(kind)
    batches = iter(loader)
    train(batches, 5)
    state, random_state = loader.state_dict(), torch.get_rng_state()
    rest = train(batches, 4)
    restarted.load_state_dict(state)
    torch.set_rng_state(random_state)
    assert train(restarted, 4) == rest
    for _ in range(3):
        before = torch.get_rng_state()
        taken(loader, 2)
        assert not torch.equal(before, torch.get_rng_state())
