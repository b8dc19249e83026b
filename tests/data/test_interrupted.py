"""Sources, data sets and loops that fail midway: continuing loses nothing, and invalid states are refused."""

import itertools
import pickle

import pytest
from torch.utils.data import DataLoader

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    LengthBatchStream,
    PaddedCollator,
    ResumableLoader,
    SequenceSource,
)

from ..support.tiers import first_fast
from .made import through_json

ITEMS = [[number] * (1 + number % 50) for number in range(600)]


class FailsOnce(list):
    """A list whose item 400 cannot be read the first time."""

    def __init__(self, items):
        super().__init__(items)
        self.failed = False

    def __getitem__(self, index):
        if index == 400 and not self.failed:
            self.failed = True
            raise OSError("the disk")
        return super().__getitem__(index)


def stream(source, *, length=len, **options):
    return LengthBatchStream(source, BatchPlanner(100), length=length, window=100, **options)


def firsts(batches):
    return sorted(item[0] for batch in batches for item in batch)


@pytest.mark.parametrize("reload", [False, True])
def test_a_source_that_fails_once(reload):
    batches = stream(SequenceSource(FailsOnce(ITEMS), shuffle=False))
    found = []
    while batches.progress.epochs == 0:
        try:
            found.extend(batches)
        except OSError:
            if reload:
                batches.load_state_dict(through_json(batches.state_dict()))
    assert firsts(found) == list(range(600))


def test_a_length_that_is_interrupted_keeps_the_budget():
    calls = itertools.count()

    def length(item):
        if next(calls) == 130:
            raise KeyboardInterrupt
        return len(item)

    batches = stream(SequenceSource(ITEMS, shuffle=False), length=length)
    found = []
    with pytest.raises(KeyboardInterrupt):
        found.extend(batches)
    found.extend(batches)
    assert firsts(found) == list(range(600))
    assert max(len(batch) * max(map(len, batch)) for batch in found) <= 100


def test_warmup_by_bucket_needs_epochs_that_end():
    scheduler = SequenceLengthScheduler(8, 64, duration=100)
    source = SequenceSource(ITEMS, infinite=True)
    with pytest.raises(ValueError, match="infinite"):
        LengthBatchStream(source, BatchPlanner(128, max_length=scheduler))
    LengthBatchStream(source, BatchPlanner(128, max_length=scheduler, warmup="cut"))


def test_a_source_split_by_rank_is_refused():
    with pytest.raises(ValueError, match="world_size"):
        stream(SequenceSource(ITEMS, rank=0, world_size=2))


def test_items_for_later_are_not_kept_in_memory():
    class Item(list):
        alive = most = 0

        def __init__(self, length):
            super().__init__([0] * length)
            Item.alive += 1
            Item.most = max(Item.most, Item.alive)

        def __del__(self):
            Item.alive -= 1

    class Items:
        def __len__(self):
            return 4000

        def __getitem__(self, index):
            return Item(4 if index % 200 == 0 else 60)

    scheduler = SequenceLengthScheduler(8, 64, duration=10_000)
    batches = LengthBatchStream(
        SequenceSource(Items(), shuffle=False), BatchPlanner(128, max_length=scheduler), window=50
    )
    next(iter(batches))
    assert Item.most < 700  # a window, the items it was chosen from, and a block of the source


@pytest.mark.parametrize("num_workers", first_fast([0, 2]))
@pytest.mark.parametrize("served", [0, 3])
def test_the_state_before_the_first_batch(num_workers, served):
    """No batch counts as served before it was yielded, however far the sampler is ahead."""

    def loader(broken=()):
        sampler = LengthBatchSampler([10] * 200, BatchPlanner(50), window=50)
        dataset = FailsAt(broken)
        plain = DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=num_workers)
        return ResumableLoader(plain), dataset

    batches = list(LengthBatchSampler([10] * 200, BatchPlanner(50), window=50))
    before, _ = loader()
    assert len(list(itertools.islice(before, served))) == served
    state = through_json(before.state_dict())

    resumed, dataset = loader(broken=batches[served])
    if served:
        resumed.load_state_dict(state)
    with pytest.raises(OSError, match="the disk"):
        next(iter(resumed))
    assert resumed.state_dict()["served"]["batches"] == resumed.progress.batches == served
    dataset.broken = ()
    assert [batch["input_ids"][:, 0].tolist() for batch in resumed] == batches[served:]


class FailsAt:
    def __init__(self, broken):
        self.broken = broken

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("the disk")
        return [index] * 10


def test_a_data_set_that_raises_stop_iteration_does_not_end_the_epoch():
    class Stops(FailsAt):
        def __getitem__(self, index):
            if index == 77:
                raise StopIteration
            return [index] * 10

    sampler = LengthBatchSampler([10] * 200, BatchPlanner(50))
    loader = ResumableLoader(DataLoader(Stops(()), batch_sampler=sampler, collate_fn=PaddedCollator()))
    with pytest.raises(RuntimeError, match="raised StopIteration: 1 batches are missing"):
        list(loader)


@pytest.mark.parametrize("remainder", ["drop", "repeat", "empty"])
def test_a_schedule_in_steps_counts_the_steps_that_were_made(remainder):
    """20 items of 5 batches an epoch, for 4 ranks: 1 step an epoch if the rest is dropped, else 2."""
    scheduler = SequenceLengthScheduler(1, 5, duration=8, step_size=1)
    planner = BatchPlanner(batch_size=4, max_length=scheduler, warmup="cut")
    sampler = LengthBatchSampler([5] * 20, planner, rank=0, world_size=4, remainder=remainder)
    lengths = [max((piece.length for piece in batch), default=0) for _ in range(12) for batch in sampler]
    assert len(lengths) == (12 if remainder == "drop" else 24)
    assert lengths[:5] == [scheduler.seq_length_at(step) for step in range(5)]
    assert sampler.progress.batches == 4 * len(lengths)


def test_dropped_batches_do_not_count_as_progress():
    sampler = LengthBatchSampler([5] * 20, BatchPlanner(batch_size=4), rank=0, world_size=4)
    list(sampler)
    assert sampler.progress.items == 16
    assert sampler.epoch == 1


def test_a_pickled_stream_continues_at_its_position():
    batches = stream(SequenceSource(ITEMS))
    iterator = iter(batches)
    head = [next(iterator) for _ in range(7)]
    assert head + list(pickle.loads(pickle.dumps(batches))) == list(stream(SequenceSource(ITEMS)))


def test_a_state_of_another_source_is_refused_when_it_is_loaded():
    batches, other = stream(SequenceSource(ITEMS)), stream(SequenceSource(ITEMS, seed=1))
    next(iter(batches))
    with pytest.raises(ValueError, match="seed"):
        other.load_state_dict(batches.state_dict())
    assert len(list(other)) > 0
