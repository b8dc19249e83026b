"""torchdata's nodes and loaders: workers, prefetching, and states."""

import random
import subprocess
import sys
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

from .made import ListSource, first_batches, items_of, served_with_restarts, through_json  # noqa: E402

# torchdata joins threads in a destructor, which may run in one of those threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]

LENGTHS = np.random.default_rng(3).integers(1, 60, 300)
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


def make_batches(kind, **rule):
    planner = BatchPlanner(128, **rule)
    if kind == "sampler":
        return LengthBatchSampler(LENGTHS, planner, window=50)
    return LengthBatchStream(ListSource(ITEMS), planner, window=50)


def make_loader(kind, num_workers=0, **options):
    dataset = ITEMS if kind == "sampler" else None
    return batch_loader(
        make_batches(kind), Prepare(PaddedCollator(), dataset=dataset), num_workers=num_workers, **options
    )


class TestStatefulDataLoader:
    UNINTERRUPTED = numbers(stateful(0)[0])

    @pytest.mark.parametrize("num_workers", [0, 1, 2])
    def test_restart(self, num_workers):
        first, _ = stateful(num_workers)
        head = numbers(islice(first, 8))
        second, _ = stateful(num_workers)
        second.load_state_dict(first.state_dict())
        assert head + numbers(second) == self.UNINTERRUPTED

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_the_next_epoch_after_a_restart_at_the_end(self, num_workers):
        first, _ = stateful(num_workers)
        assert numbers(first) == self.UNINTERRUPTED
        second, _ = stateful(num_workers)
        second.load_state_dict(first.state_dict())
        next_epoch = numbers(second)
        assert sorted(items_of(next_epoch)) == list(range(300))
        assert next_epoch != self.UNINTERRUPTED
        assert next_epoch == numbers(first)

    def test_another_number_of_workers(self):
        """torchdata refuses its own states then. The sampler's state inside is accepted."""
        first, _ = stateful(2)
        head = numbers(islice(first, 8))
        state = first.state_dict()
        second, _ = stateful(0)
        second.load_state_dict(state)
        with pytest.raises(AssertionError):
            iter(second)
        second, sampler = stateful(0)
        sampler.load_state_dict(through_json(batch_state(state)))
        head += numbers(islice(second, 4))
        third, sampler = stateful(1)
        sampler.load_state_dict(batch_state(second.state_dict()))
        assert head + numbers(third) == self.UNINTERRUPTED

    def test_a_state_from_some_batches_before(self):
        first, _ = stateful(1, snapshot_every_n_steps=5)
        list(islice(first, 8))
        with pytest.raises(ValueError, match="must be that of the last batch, got one of 3 batches before it"):
            batch_state(first.state_dict())

    def test_a_state_without_batches(self):
        with pytest.raises(ValueError, match=r"state_dict must hold a state of batches, got \['_snapshot'\]"):
            batch_state({"_snapshot": {"_main_snapshot": {}}})


@pytest.mark.parametrize("kind", ["sampler", "stream"])
class TestBatchLoader:
    @pytest.mark.parametrize("options", [{}, {"prefetch": 0}, {"num_workers": 2}, {"num_workers": 2, "prefetch": 4}])
    def test_restarts(self, kind, options):
        uninterrupted = numbers(make_loader(kind, prefetch=0))
        stops = sorted(random.Random(str(options)).sample(range(len(uninterrupted)), 4))
        (batches,) = served_with_restarts(lambda rank: make_loader(kind, **options), 1, stops)
        assert numbers(batches) == uninterrupted

    def test_worker_processes(self, kind):
        uninterrupted = numbers(make_loader(kind, prefetch=0))
        assert numbers(make_loader(kind, 1, method="process")) == uninterrupted

    def test_another_number_of_workers(self, kind):
        uninterrupted = numbers(make_loader(kind, prefetch=0))
        first = make_loader(kind, 2, prefetch=4)
        head = numbers(islice(first, 6))
        second = make_loader(kind, 0, prefetch=0)
        second.load_state_dict(first.state_dict())
        head += numbers(islice(second, 6))
        third = make_loader(kind, 1, prefetch=1)
        third.load_state_dict(second.state_dict())
        assert head + numbers(third) == uninterrupted

    def test_an_interrupted_iteration_continues(self, kind):
        """As that of a DataLoader: batches that were fetched and not yielded are a stream's next ones."""
        plain, loader = make_loader(kind, prefetch=0), make_loader(kind, 1, prefetch=4)
        epochs = [numbers(plain) for _ in range(3)]
        passes = [numbers(islice(loader, 5)), numbers(islice(loader, 5)), numbers(loader)]
        if kind == "sampler":
            assert passes == [epochs[0][:5], epochs[1][:5], epochs[2]]
        else:
            assert [*passes[0], *passes[1], *passes[2]] == epochs[0]

    def test_epochs(self, kind):
        loader, plain = make_loader(kind), make_batches(kind)
        for _ in range(2):
            first_of_items = [[item if kind == "sampler" else item[0] for item in batch] for batch in plain]
            assert numbers(loader) == first_of_items
        assert loader.progress.epochs == 2
        assert loader.progress.items == 600

    def test_a_restart_between_epochs(self, kind):
        first = make_loader(kind, 1)
        list(first)
        second = make_loader(kind)
        second.load_state_dict(through_json(first.state_dict()))
        assert numbers(second) == numbers(first)

    def test_an_older_iterator_is_invalid(self, kind):
        loader = make_loader(kind)
        older, newer = iter(loader), iter(loader)
        head = [next(older), next(newer)]
        with pytest.raises(RuntimeError, match="this iterator is invalid: the loader was iterated again"):
            next(older)
        following = numbers(make_loader(kind, prefetch=0))[1:]
        if kind == "sampler":
            plain = make_loader(kind, prefetch=0)
            plain.set_epoch(1)
            following = numbers(plain)
        assert numbers([head[1], *newer]) == following

    def test_after_the_last_batch_of_an_epoch(self, kind):
        """The end of the epoch was not requested."""
        loader, plain = make_loader(kind), make_loader(kind, prefetch=0)
        epoch = numbers(plain)
        assert numbers(islice(loader, len(epoch))) == epoch
        assert numbers(loader) == numbers(plain)

    def test_a_node_among_others(self, kind):
        node = nodes.Prefetcher(nodes.IterableWrapper(make_batches(kind)), 3)
        loader = nodes.Loader(node)
        head = list(islice(loader, 4))
        again = nodes.Loader(nodes.Prefetcher(nodes.IterableWrapper(make_batches(kind)), 3))
        again.load_state_dict(loader.state_dict())
        assert head + list(again) == list(make_batches(kind))


@pytest.mark.parametrize("stop", [None, 4])
def test_the_epoch_of_the_sampler(stop):
    """It is the next one, whatever the loader had fetched."""
    planned, batches = make_batches("sampler"), make_batches("sampler")
    loader = batch_loader(batches, Prepare(PaddedCollator(), dataset=ITEMS), num_workers=1, prefetch=4)
    for epoch in (0, 5, 5, 2):
        batches.set_epoch(epoch)
        planned.set_epoch(epoch)
        assert numbers(islice(loader, stop)) == first_batches(planned, stop)
        assert loader.progress == planned.progress


def test_a_batch_that_stops_the_iteration_is_missing():
    def stop(batch):
        raise StopIteration

    with pytest.raises(RuntimeError, match="raised StopIteration: 1 batches are missing"):
        list(batch_loader(make_batches("stream"), stop, prefetch=0))


def test_an_error_in_preparing_reaches_the_loop():
    def fail(batch):
        raise ValueError(f"no batch of {len(batch)}")

    with pytest.raises(ValueError, match="no batch of"):
        next(iter(batch_loader(make_batches("stream"), fail, num_workers=1)))


def double(item):
    return [token for token in item for _ in range(2)]


def test_tokenizing_before_planning():
    def make():
        tokens = NodeSource(nodes.ParallelMapper(nodes.IterableWrapper(SequenceSource(ITEMS)), double, num_workers=2))
        stream = LengthBatchStream(tokens, BatchPlanner(256, packed=True), window=50)
        return batch_loader(stream, Prepare(PackedCollator(max_tokens=256)), num_workers=1)

    uninterrupted = [batch["input_ids"].tolist() for batch in make()]
    assert sum(len(batch[0]) for batch in uninterrupted) == 2 * LENGTHS.sum()
    for at in (1, 20, 41):
        first, second = make(), make()
        head = [batch["input_ids"].tolist() for batch in islice(first, at)]
        second.load_state_dict(through_json(first.state_dict()))
        assert head + [batch["input_ids"].tolist() for batch in second] == uninterrupted


@pytest.mark.parametrize("num_workers", [0, 2])
def test_threads_of_interrupted_iterations_change_nothing(num_workers):
    """They may still read the source while the next iteration reads it."""

    class Slow(list):
        def __getitem__(self, index):
            time.sleep(0.002)
            return super().__getitem__(index)

    def loader():
        stream = LengthBatchStream(SequenceSource(Slow(ITEMS[:120])), BatchPlanner(120), window=20)
        return batch_loader(stream, PaddedCollator(), num_workers=num_workers)

    expected = [batch["input_ids"].tolist() for batch in loader()]
    interrupted, got = loader(), []
    while len(got) < len(expected):
        got.append(next(iter(interrupted))["input_ids"].tolist())
    assert got == expected


def test_epochs_of_a_node():
    source = NodeSource(nodes.IterableWrapper(ListSource(ITEMS)))
    stream = LengthBatchStream(source, BatchPlanner(128), window=50)
    plain = make_batches("stream")
    for _ in range(3):
        assert list(stream) == list(plain)


def mixed(criteria, *sources, **options):
    named = {str(number): nodes.IterableWrapper(source) for number, source in enumerate(sources)}
    weights = dict.fromkeys(named, 1.0)
    return nodes.MultiNodeWeightedSampler(named, weights, stop_criteria=criteria, **options)


class TestWhatNodesTellOfTheirSources:
    """A stream took sources that it refuses, if they were inside a NodeSource."""

    def test_a_split_by_rank(self):
        half = SequenceSource(ITEMS, rank=1, world_size=2)
        for node in (
            nodes.IterableWrapper(half),
            nodes.Prefetcher(nodes.ParallelMapper(nodes.IterableWrapper(half), double, num_workers=0), 2),
            nodes.IterableWrapper(half),
            mixed(nodes.StopCriteria.CYCLE_FOREVER, ListSource(ITEMS), half),
            mixed(nodes.StopCriteria.CYCLE_FOREVER, ListSource(ITEMS), rank=1, world_size=2),  # orders differ
        ):
            with pytest.raises(ValueError, match="source must not be split by rank, got world_size 2"):
                LengthBatchStream(NodeSource(node), BatchPlanner(128), rank=1, world_size=2)
        assert NodeSource(nodes.IterableWrapper(ListSource(ITEMS))).world_size == 1


def test_python_ends_while_batches_are_fetched_ahead(tmp_path):
    """A thread in torch's code at that moment would abort the process."""
    program = """
import torch
from seqwarm_kernels.data import BatchPlanner, LengthBatchStream, SequenceSource
from seqwarm_kernels.data.torchdata_nodes import batch_loader

stream = LengthBatchStream(SequenceSource([1] * 100, infinite=True), BatchPlanner(10), length=int, window=100)
loader = batch_loader(stream, lambda items: {"input_ids": torch.ones(3000, 3000).sum(0)[None, :1]}, num_workers=2)
for number, _ in enumerate(loader):
    if number == 2:
        break
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
