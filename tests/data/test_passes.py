"""Passes over loaders that end early, go on, and are restarted from states, against lists of all batches."""

from functools import cache
from itertools import chain, islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, precondition, rule
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    PaddedCollator,
    Prepare,
    ResumableLoader,
    SequenceSource,
)

from ..support.tiers import examples, first_fast
from .data_sets import FORMATS
from .made import through_json
from .token_files import documents

ITEMS = [[number + 1] * (1 + number % 7) for number in range(60)]  # some 20 batches
KINDS = ("sampler", "infinite sampler", "stream", "infinite stream")


def batches_of(kind, planner=None, *, rank=0, world_size=1, source=None, **options):
    planner = planner or BatchPlanner(16)
    options = {"window": 20, "rank": rank, "world_size": world_size, **options}
    infinite = kind.startswith("infinite")
    if kind.endswith("sampler"):
        return LengthBatchSampler(list(map(len, ITEMS)), planner, seed=2, infinite=infinite, **options)
    source = source or SequenceSource(ITEMS, seed=2, infinite=infinite)
    return LengthBatchStream(source, planner, seed=2, **options)


def loader_of(kind, planner=None, *, num_workers=0, persistent=False, collate=None, **options):
    batches = batches_of(kind, planner, **options)
    dataset = None if kind.endswith("stream") else ITEMS
    return ResumableLoader(
        DataLoader(
            ItemDataset(),
            batch_sampler=batches,
            collate_fn=Prepare(collate or PaddedCollator(), dataset=dataset),
            num_workers=num_workers,
            persistent_workers=persistent,
        )
    )


def items_of(batch):
    """The tokens of an item are its number, counted from 1."""
    return batch["input_ids"][:, 0].tolist()


def taken(loader, count=None):
    return [items_of(batch) for batch in islice(loader, count)]


@cache
def all_batches(kind, epoch=0):
    """The batches of an epoch, or the first ones of an infinite sequence of epochs, for one rank."""
    if kind.startswith("infinite"):
        return taken(loader_of(kind), 300)
    loader = loader_of(kind)
    if kind == "sampler":
        loader.set_epoch(epoch)
        return taken(loader)
    return [taken(loader) for _ in range(epoch + 1)][-1]


class Passes(RuleBasedStateMachine):
    """A loader of one of several ranks. A place is an epoch, the number of its batches that all ranks were served, and
    whether the next pass starts there."""

    states = Bundle("states")

    @initialize(kind=st.sampled_from(KINDS))
    def make(self, kind):
        self.kind = kind
        self.place = self.previous = (0, 0, True)
        self.make_loader(1, 0)

    def make_loader(self, world_size, rank):
        self.rank, self.world_size = rank, world_size
        self.loader = loader_of(self.kind, rank=rank, world_size=world_size)
        self.batches = self.cursor = None

    def left(self, epoch, served):
        return len(all_batches(self.kind, epoch)) - served >= self.world_size

    def start_of_pass(self):
        epoch, served, is_start = self.place
        is_over = self.kind == "sampler" or (self.kind == "stream" and not self.left(epoch, served))
        return (epoch + 1, 0, True) if is_over and served and not is_start else (epoch, served, True)

    @rule()
    def start_pass(self):
        self.batches, self.cursor = iter(self.loader), None

    @precondition(lambda self: self.batches is not None)
    @rule(count=st.integers(1, 9))
    def take(self, count):
        for _ in range(count):
            if self.cursor is None:  # an iterator starts with its first batch
                self.cursor = self.place = self.start_of_pass()
            epoch, served, _ = self.cursor
            batch = next(self.batches, None)
            if not self.left(epoch, served):
                assert batch is None
                self.place = self.previous = (epoch + 1, 0, True)
                self.batches = None
                return
            assert items_of(batch) == all_batches(self.kind, epoch)[served + self.rank]
            self.previous = self.cursor
            self.cursor = self.place = (epoch, served + self.world_size, False)

    @precondition(lambda self: not self.kind.startswith("infinite"))
    @rule()
    def finish(self):
        if self.batches is not None:
            self.take(100)

    @precondition(lambda self: not self.kind.startswith("infinite"))
    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        self.loader.set_epoch(epoch)
        if self.kind == "sampler" and not (self.place[2] and epoch == self.place[0]):
            self.place = self.previous = (epoch, 0, True)

    @rule()
    def end_pass(self):
        self.loader.end_pass()
        self.place = self.previous = self.start_of_pass()

    @rule(target=states, previous=st.booleans())
    def save(self, previous):
        state = self.loader.previous_state_dict() if previous else self.loader.state_dict()
        return self.previous if previous else self.place, through_json(state)

    @rule(saved=states, world_size=st.integers(1, 3), data=st.data())
    def restart(self, saved, world_size, data):
        self.make_loader(world_size, data.draw(st.integers(0, world_size - 1)))
        self.load(saved)

    @rule(saved=states)
    def load(self, saved):
        (epoch, served, _), state = saved
        self.loader.load_state_dict(state)
        self.place = self.previous = (epoch, served, True)
        self.batches = None


Passes.TestCase.settings = examples(100, stateful_step_count=40, deadline=None)
TestPasses = Passes.TestCase


@pytest.mark.parametrize(("num_workers", "persistent"), first_fast([(1, True), (0, False), (2, False)]))
@pytest.mark.parametrize("kind", KINDS)
def test_passes_that_end_early(kind, num_workers, persistent):
    """Batches that workers fetched and that were not yielded are in no pass, and those of an infinite loader next."""
    loader = loader_of(kind, num_workers=num_workers, persistent=persistent)
    passes = [taken(loader, 6) for _ in range(3)]
    first = all_batches(kind)
    expected = [all_batches(kind, n)[:6] if kind == "sampler" else first[6 * n :][:6] for n in range(3)]
    assert passes == expected
    assert loader.progress[0] == sum(len(batch) for batches in passes for batch in batches)
    assert loader.progress[2] == 18
    restarted = loader_of(kind)
    restarted.load_state_dict(through_json(loader.state_dict()))
    assert taken(restarted, 2) == (all_batches(kind, 2)[6:8] if kind == "sampler" else first[18:20])


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_before_the_last_batch(kind):
    loader = loader_of(kind)
    for _ in range(2):
        states = []
        for _ in islice(loader, 7):
            states.append(loader.state_dict())
            assert states[:-1][-1:] in ([], [loader.previous_state_dict()])
        loader.end_pass()
        start = loader.state_dict()
        assert loader.previous_state_dict() == start
    again = loader_of(kind)
    for _ in range(2):
        taken(again, 7)
    taken(again, 1)
    assert again.previous_state_dict() == start


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_that_takes_exactly_all_batches_of_an_epoch(kind):
    """The end was not requested. The next pass is not empty."""
    loader, counts = loader_of(kind), [len(all_batches("sampler", epoch)) for epoch in range(2)]
    first, second = (taken(loader, count) for count in counts)
    if kind.startswith("infinite"):
        assert first + second == all_batches(kind)[: sum(counts)]
    else:
        assert [first, second] == [all_batches(kind, epoch) for epoch in range(2)]


def test_an_infinite_stream_of_torchdata_goes_on_too():
    nodes = pytest.importorskip("seqwarm_kernels.data.torchdata_nodes")
    loader = nodes.batch_loader(batches_of("infinite stream"), Prepare(PaddedCollator()))
    assert list(chain(*(taken(loader, 7) for _ in range(3)))) == all_batches("infinite stream")[:21]


def schedule(unit):
    return SequenceLengthScheduler(
        2, 7, duration={"step": 30, "token": 300, "sample": 80}[unit], step_size=1, unit=unit
    )


PLANNERS = {
    "budget": lambda: BatchPlanner(16, multiple_of=2),
    "packed": lambda: BatchPlanner(16, packed=True),
    "split": lambda: BatchPlanner(5, too_long="split"),
    "cut by steps": lambda: BatchPlanner(16, max_length=schedule("step"), warmup="cut"),
    "buckets by tokens": lambda: BatchPlanner(16, max_length=schedule("token")),
    "buckets by samples": lambda: BatchPlanner(16, max_length=schedule("sample")),
}


class Lists:
    """A collator for every planner."""

    def __call__(self, items):
        return {"input_ids": torch.tensor([item[0] if len(item) else 0 for item in items])[:, None]}


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
@examples(20, deadline=None)
def test_a_restart_serves_what_the_process_would_have(planner, kind, window, remainder, ranks, lengths, at, ends_pass):
    """Passes of some lengths, and a restart between two of them, or in the middle of one."""
    if kind == "infinite stream" and planner.startswith("buckets"):
        kind = "infinite sampler"

    def make():
        options = {"window": window, "remainder": remainder, "rank": ranks[0], "world_size": ranks[1]}
        return loader_of(kind, PLANNERS[planner](), collate=Lists(), **options)

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


@pytest.mark.parametrize("name", FORMATS)
def test_every_source_goes_on(tmp_path, name):
    write, open_source = FORMATS[name]
    path = write(tmp_path, documents(80))

    def make(infinite=True):
        stream = LengthBatchStream(open_source(path, infinite=infinite), BatchPlanner(batch_size=3), window=20)
        plain = DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=lambda items: [list(item) for item in items])
        return ResumableLoader(plain)

    whole, loader, served = list(islice(make(), 60)), make(), []
    for length in (7, 1, 13, 9, 21):
        served += list(islice(loader, length))
        state, loader = through_json(loader.state_dict()), make()
        loader.load_state_dict(state)
        served += list(islice(loader, 1))
    assert served == whole[: len(served)]


class TestRandomStreams:
    """A DataLoader draws a seed for its workers when a pass starts."""

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_restart_in_a_pass_draws_no_seed(self, kind):
        def train(loader, count):
            return [(items_of(batch), torch.rand(()).item()) for batch in islice(loader, count)]

        torch.manual_seed(0)
        loader = loader_of(kind)
        batches = iter(loader)
        train(batches, 5)
        state, random_state = loader.state_dict(), torch.get_rng_state()
        rest = train(batches, 4)
        restarted = loader_of(kind)
        restarted.load_state_dict(state)
        torch.set_rng_state(random_state)
        assert train(restarted, 4) == rest

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_other_pass_does(self, kind):
        loader = loader_of(kind)
        for _ in range(3):
            before = torch.get_rng_state()
            taken(loader, 2)
            assert not torch.equal(before, torch.get_rng_state())
