"""Loaders of batches: states count the yielded batches only, however far workers are ahead. Progress bars."""

import io
from itertools import islice

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    LengthBatchStream,
    PaddedCollator,
    ResumableLoader,
    progress_bar,
)

from ..support.tiers import first_fast
from .made import ListSource, through_json

LENGTHS = np.random.default_rng(3).integers(1, 60, 100)
ITEMS = [torch.full((int(length),), number) for number, length in enumerate(LENGTHS)]


def loader(num_workers=0, *, dataset=ITEMS, lengths=LENGTHS):
    sampler = LengthBatchSampler(lengths, BatchPlanner(128), window=50)
    return ResumableLoader(
        DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=num_workers)
    )


def numbers(batches):
    """The items of each batch. The tokens of an item are its number."""
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


UNINTERRUPTED = numbers(loader())


def test_an_older_iterator_is_invalid():
    batches = loader()
    older = iter(batches)
    next(older)
    newer = iter(batches)
    next(newer)
    with pytest.raises(RuntimeError, match="iterator is invalid"):
        next(older)
    next(newer)
    assert batches.progress.batches == 3
    batches.load_state_dict(loader().state_dict())
    with pytest.raises(RuntimeError, match="iterator is invalid"):
        next(newer)
    assert numbers(batches) == UNINTERRUPTED


class Failing:
    """Raises `error` for some of 200 items of 10 tokens."""

    def __init__(self, broken, error=OSError):
        self.broken, self.error = broken, error

    def __len__(self):
        return 200

    def __getitem__(self, index):
        if index in self.broken:
            raise self.error("the disk")
        return [index] * 10


@pytest.mark.parametrize("num_workers", first_fast([0, 2]))
@pytest.mark.parametrize("served", [0, 3])
def test_a_batch_that_fails_does_not_count(num_workers, served):
    """No batch counts before it was yielded, however far the sampler is ahead."""

    def make(broken=()):
        dataset = Failing(broken)
        return loader(num_workers, dataset=dataset, lengths=[10] * 200), dataset

    before, _ = make()
    batches = numbers(make()[0])
    assert len(before) == len(batches)
    assert len(list(islice(before, served))) == served
    resumed, dataset = make(broken=batches[served])
    if served:
        resumed.load_state_dict(through_json(before.state_dict()))
    with pytest.raises(OSError, match="the disk"):
        next(iter(resumed))
    assert resumed.state_dict()["yielded"]["batches"] == resumed.progress.batches == served
    dataset.broken = ()
    assert numbers(resumed) == batches[served:]


def test_a_data_set_that_raises_stop_iteration_does_not_end_the_epoch():
    with pytest.raises(RuntimeError, match="StopIteration: 1 batches are missing"):
        list(loader(dataset=Failing([77], StopIteration), lengths=[10] * 200))


def test_loaders_that_do_not_fit():
    sampler = LengthBatchSampler(LENGTHS, BatchPlanner(128))
    stream = LengthBatchStream(ListSource(ITEMS), BatchPlanner(128), window=50)
    for named, options in (
        ("batch_sampler", {}),
        ("in_order", {"batch_sampler": sampler, "in_order": False}),
        ("dataset", {"batch_sampler": stream}),  # items that are tensors would index the dataset
    ):
        with pytest.raises(ValueError, match=named):
            ResumableLoader(DataLoader(ITEMS, **options))


# ---- progress bars


NAMES = {"token": "tokens", "item": "items", "batch": "batches"}


@pytest.mark.parametrize(
    ("unit", "total"), [("token", int(LENGTHS.sum())), ("item", 100), ("batch", len(UNINTERRUPTED))]
)
def test_a_progress_bar(unit, total):
    written = io.StringIO()
    options = {"unit": unit, "total": total, "file": written, "mininterval": 0, "unit_scale": False}
    assert numbers(progress_bar(loader(), **options)) == UNINTERRUPTED
    last = written.getvalue().strip().split("\r")[-1]
    assert f"{total}/{total}" in last
    assert "100%" in last
    assert "epoch=1.00" in last
    first, second, written = loader(), loader(), io.StringIO()
    list(islice(first, 9))
    second.load_state_dict(first.state_dict())
    next(progress_bar(second, **{**options, "file": written}))
    assert f"{getattr(first.progress, NAMES[unit])}/{total}" in written.getvalue()
    stream = LengthBatchStream(ListSource(ITEMS), BatchPlanner(128), window=50)
    assert sum(len(batch) for batch in progress_bar(stream, unit=unit, file=io.StringIO())) == 100
