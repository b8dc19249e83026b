"""torchdata's nodes and loaders: workers, prefetching, and states."""

import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch

nodes = pytest.importorskip("torchdata.nodes")
from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

from seqwarm_kernels.data import (  # noqa: E402
    BatchPlanner,
    LengthBatchSampler,
    LengthBatchStream,
    PackedCollator,
    PaddedCollator,
    Prepare,
    SequenceSource,
    batch_state,
)
from seqwarm_kernels.data.torchdata_nodes import NodeSource, batch_loader  # noqa: E402

from .made import ListSource, items_of, through_json  # noqa: E402

# torchdata joins threads in a destructor, which may run in one of those threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    """When an iterator ends, torchdata waits for five of these in each of its threads."""
    monkeypatch.setattr("torchdata.nodes.map.QUEUE_TIMEOUT", 0.001)


LENGTHS = np.random.default_rng(3).integers(1, 60, 120)
ITEMS = [[number] * int(length) for number, length in enumerate(LENGTHS)]
TENSORS = [torch.tensor(item) for item in ITEMS]


def numbers(batches):
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def stateful(num_workers, **options):
    sampler = LengthBatchSampler(LENGTHS, BatchPlanner(128), window=50)
    loader = StatefulDataLoader(
        TENSORS, batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=num_workers, **options
    )
    return loader, sampler


def make_batches(kind):
    planner = BatchPlanner(128)
    if kind == "sampler":
        return LengthBatchSampler(LENGTHS, planner, window=50)
    return LengthBatchStream(ListSource(ITEMS), planner, window=50)


def test_restarts_of_a_stateful_loader():
    """In an epoch, and at its end. The state of the sampler is one for any number of workers."""
    uninterrupted = numbers(stateful(0)[0])
    (first, _), (second, _), (third, sampler) = map(stateful, (2, 2, 0))
    head = numbers(islice(first, 8))
    state = first.state_dict()
    second.load_state_dict(state)
    assert head + numbers(second) == uninterrupted
    sampler.load_state_dict(through_json(batch_state(state)))
    assert head + numbers(third) == uninterrupted
    third.load_state_dict(third.state_dict())
    next_epoch = numbers(third)
    assert sorted(items_of(next_epoch)) == list(range(120))
    assert next_epoch != uninterrupted
    assert next_epoch == numbers(second)


def test_a_state_from_some_batches_before_or_without_batches():
    loader, _ = stateful(1, snapshot_every_n_steps=5)
    list(islice(loader, 8))
    for state in (loader.state_dict(), {"_snapshot": {"_main_snapshot": {}}}):
        with pytest.raises(ValueError, match="state_dict"):
            batch_state(state)


def test_worker_processes():
    prepare = Prepare(PaddedCollator(), dataset=ITEMS)
    in_process = batch_loader(make_batches("sampler"), prepare, num_workers=1, method="process")
    assert numbers(in_process) == numbers(batch_loader(make_batches("sampler"), prepare, prefetch=0))


@pytest.mark.parametrize("kind", ["sampler", "stream"])
def test_a_node_among_others(kind):
    loader, again = (nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(make_batches(kind)), 3)) for _ in range(2))
    head = list(islice(loader, 4))
    again.load_state_dict(loader.state_dict())
    assert head + list(again) == list(make_batches(kind))


def double(item):
    return [token for token in item for _ in range(2)]


def test_tokenizing_before_planning():
    def make():
        tokens = NodeSource(nodes.ParallelMapper(nodes.IterableWrapper(SequenceSource(ITEMS)), double, num_workers=2))
        stream = LengthBatchStream(tokens, BatchPlanner(256, packed=True), window=50)
        return batch_loader(stream, Prepare(PackedCollator(max_tokens=256)), num_workers=1)

    uninterrupted = [batch["input_ids"].tolist() for batch in make()]
    assert sum(len(batch[0]) for batch in uninterrupted) == 2 * LENGTHS.sum()
    first, second = make(), make()
    head = [batch["input_ids"].tolist() for batch in islice(first, 20)]
    second.load_state_dict(through_json(first.state_dict()))
    assert head + [batch["input_ids"].tolist() for batch in second] == uninterrupted


@pytest.mark.parametrize("ends_with", ["next", "end"])
def test_epochs_of_a_node(ends_with):
    """Alone, and in a stream."""

    def make():
        return NodeSource(nodes.IterableWrapper(ListSource(ITEMS, ends_with)))

    source, plain = make(), ListSource(ITEMS)
    for _ in range(2):
        assert list(source) == list(plain)
    stream, plain = LengthBatchStream(make(), BatchPlanner(128), window=50), make_batches("stream")
    for _ in range(2):
        assert list(stream) == list(plain)


def test_threads_of_interrupted_iterations_change_nothing():
    """They may still read the source while the next iteration reads it."""

    class Slow(list):
        def __getitem__(self, index):
            time.sleep(0.002)
            return super().__getitem__(index)

    def loader():
        stream = LengthBatchStream(SequenceSource(Slow(ITEMS[:12])), BatchPlanner(120), window=4)
        return batch_loader(stream, PaddedCollator(), num_workers=2)

    expected = [batch["input_ids"].tolist() for batch in loader()]
    interrupted, got = loader(), []
    while len(got) < len(expected):
        got.append(next(iter(interrupted))["input_ids"].tolist())
    assert got == expected


def mixed(criteria, *sources, **options):
    named = {str(number): nodes.IterableWrapper(source) for number, source in enumerate(sources)}
    weights = dict.fromkeys(named, 1.0)
    return nodes.MultiNodeWeightedSampler(named, weights, stop_criteria=criteria, **options)


def test_a_split_by_rank():
    """A stream took sources that it refuses, if they were inside a NodeSource."""
    half = SequenceSource(ITEMS, rank=1, world_size=2)
    for node in (
        nodes.Prefetcher(nodes.ParallelMapper(nodes.IterableWrapper(half), double, num_workers=0), 2),
        mixed(nodes.StopCriteria.CYCLE_FOREVER, ListSource(ITEMS), half),
        mixed(nodes.StopCriteria.CYCLE_FOREVER, ListSource(ITEMS), rank=1, world_size=2),  # orders differ
    ):
        with pytest.raises(ValueError, match="world_size"):
            LengthBatchStream(NodeSource(node), BatchPlanner(128), rank=1, world_size=2)
    assert NodeSource(nodes.IterableWrapper(ListSource(ITEMS))).world_size == 1


def test_the_threads_of_a_loader_end_with_it():
    def prepare(items):
        time.sleep(0.2)
        return {"input_ids": torch.ones(1, 1)}

    before = set(threading.enumerate())
    loader = batch_loader(make_batches("sampler"), prepare, num_workers=2, prefetch=8)
    next(iter(loader))
    started = set(threading.enumerate()) - before
    assert started
    del loader
    assert not any(thread.is_alive() for thread in started)
