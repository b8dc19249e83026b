"""DataLoaders with workers: states count the yielded batches only."""

import io
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    PaddedCollator,
    PieceDataset,
    Prepare,
    ResumableLoader,
    progress_bar,
)

from .made import ListSource, served_with_restarts, through_json

LENGTHS = np.random.default_rng(3).integers(1, 60, 300)
ITEMS = [torch.full((int(length),), number) for number, length in enumerate(LENGTHS)]


def loader(num_workers=0, *, window=50, too_long="reject", persistent=False, max_tokens=128, **options):
    planner = BatchPlanner(max_tokens, too_long=too_long)
    sampler = LengthBatchSampler(LENGTHS, planner, window=window, **options)
    dataset = PieceDataset(ITEMS) if planner.cuts_items else ITEMS
    plain = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=PaddedCollator(max_tokens=max_tokens),
        num_workers=num_workers,
        persistent_workers=persistent,
    )
    return ResumableLoader(plain)


def stream_loader(num_workers=0, *, persistent=False, **options):
    stream = LengthBatchStream(ListSource(ITEMS), BatchPlanner(128, **options), window=50)
    return ResumableLoader(
        DataLoader(
            ItemDataset(),
            batch_sampler=stream,
            collate_fn=Prepare(PaddedCollator()),
            num_workers=num_workers,
            persistent_workers=persistent,
        )
    )


def numbers(batches):
    """The items of each batch. The tokens of an item are its number."""
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def numbers_of_epoch(epoch):
    batches = loader()
    batches.set_epoch(epoch)
    return numbers(batches)


UNINTERRUPTED, NEXT = numbers_of_epoch(0), numbers_of_epoch(1)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_restarts_with_workers_that_fetch_ahead(num_workers):
    """The state is that of the last yielded batch, however far ahead the workers are."""
    stops = sorted(random.Random(num_workers).sample(range(len(UNINTERRUPTED)), 20 if num_workers == 0 else 4))
    (batches,) = served_with_restarts(lambda rank: loader(num_workers), 1, stops)
    assert numbers(batches) == UNINTERRUPTED


def test_another_number_of_workers():
    first = loader(2)
    head = numbers(islice(first, 7))
    second = loader(0)
    second.load_state_dict(through_json(first.state_dict()))
    head += numbers(islice(second, 5))
    third = loader(1)
    third.load_state_dict(through_json(second.state_dict()))
    assert head + numbers(third) == UNINTERRUPTED


def test_persistent_workers():
    batches = loader(1, persistent=True)
    assert numbers(batches) == UNINTERRUPTED
    assert numbers(islice(batches, 3)) == NEXT[:3]
    batches.set_epoch(0)
    assert numbers(batches) == UNINTERRUPTED


@pytest.mark.parametrize("num_workers", [0, 1])
def test_the_next_epoch_follows_an_interrupted_one(num_workers):
    """Even if the workers fetched the rest of the epoch, which was not yielded."""
    batches = loader(num_workers)
    list(islice(batches, len(UNINTERRUPTED) - 1))
    assert numbers(batches) == NEXT
    batches.set_epoch(0)
    assert numbers(islice(batches, 3)) == UNINTERRUPTED[:3]


def test_saved_after_the_last_batch():
    first = loader(1)
    steps = iter(first)
    for _ in UNINTERRUPTED:
        next(steps)
    state = through_json(first.state_dict())
    second = loader(0)
    second.load_state_dict(state)
    assert numbers(second) == []
    third = loader(0)
    third.set_epoch(1)
    assert numbers(second) == numbers(third)


def test_pieces():
    batches = list(loader(1, too_long="split", max_tokens=32))
    assert sum(int(batch["attention_mask"].sum()) for batch in batches) == LENGTHS.sum()
    assert all(batch["input_ids"].numel() <= 32 for batch in batches)


def test_ranks_that_run_out_get_padding():
    by_rank = [list(loader(0, rank=rank, world_size=7, remainder="empty")) for rank in range(7)]
    assert len({len(batches) for batches in by_rank}) == 1
    rows = [batch["attention_mask"].any(dim=1) for batches in by_rank for batch in batches]
    assert sum(int(row.sum()) for row in rows) == 300
    assert any(not batches[-1]["attention_mask"].any() for batches in by_rank)


class TestStream:
    @pytest.mark.parametrize("num_workers", [0, 2])
    def test_restarts(self, num_workers):
        uninterrupted = numbers(stream_loader())
        stops = sorted(random.Random(num_workers).sample(range(len(uninterrupted)), 20 if num_workers == 0 else 4))
        (batches,) = served_with_restarts(lambda rank: stream_loader(num_workers), 1, stops)
        assert numbers(batches) == uninterrupted
        assert sorted(number for batch in uninterrupted for number in batch) == list(range(300))

    @pytest.mark.parametrize(("num_workers", "persistent"), [(0, False), (1, False), (1, True)])
    def test_an_interrupted_iteration_continues(self, num_workers, persistent):
        """Batches that were fetched and not yielded are yielded again."""
        batches, plain = stream_loader(num_workers, persistent=persistent), stream_loader()
        uninterrupted, following = numbers(plain), numbers(plain)
        head = numbers(islice(batches, 7)) + numbers(islice(batches, 40))
        batches.set_epoch(0)
        assert head + numbers(batches) == uninterrupted
        assert batches.progress[:2] == (300, LENGTHS.sum())
        assert numbers(batches) == following != uninterrupted

    def test_pieces(self):
        batches = list(stream_loader(1, too_long="split", max_length=32))
        assert sum(int(batch["attention_mask"].sum()) for batch in batches) == LENGTHS.sum()
        assert max(batch["input_ids"].shape[1] for batch in batches) == 32


def test_a_stream_needs_a_dataset_of_items():
    """Items that are tensors would index the dataset."""
    stream = LengthBatchStream(ListSource(ITEMS), BatchPlanner(128), window=50)
    with pytest.raises(ValueError, match=r"dataset of loader must be ItemDataset\(\) .*, got list"):
        ResumableLoader(DataLoader(ITEMS, batch_sampler=stream, collate_fn=PaddedCollator()))


@pytest.mark.parametrize("make", [loader, stream_loader])
def test_an_older_iterator_is_invalid(make):
    batches = make()
    older, expected = iter(batches), numbers(make())
    next(older)
    newer = iter(batches)
    head = [next(newer)]
    with pytest.raises(RuntimeError, match="this iterator is invalid: the loader was iterated again"):
        next(older)
    assert numbers(head + list(newer)) == (expected[1:] if make is stream_loader else NEXT)
    newer = iter(batches)
    next(newer)
    batches.load_state_dict(make().state_dict())
    with pytest.raises(RuntimeError, match="or restored in the meantime"):
        next(newer)
    assert numbers(batches) == expected


def test_length_and_progress():
    batches = loader(2)
    assert len(batches) == len(UNINTERRUPTED)
    items = tokens = 0
    for count, batch in enumerate(batches, start=1):
        items, tokens = items + len(batch["input_ids"]), tokens + int(batch["attention_mask"].sum())
        assert batches.progress == (items, tokens, count, pytest.approx(items / 300))
    assert batches.progress.epochs == 1


@pytest.mark.parametrize(
    ("unit", "total"), [("token", int(LENGTHS.sum())), ("item", 300), ("batch", len(UNINTERRUPTED))]
)
def test_a_progress_bar(unit, total):
    written = io.StringIO()
    batches = loader()
    options = {"total": total, "file": written, "mininterval": 0, "unit_scale": False}
    assert numbers(progress_bar(batches, unit=unit, **options)) == UNINTERRUPTED
    last = written.getvalue().strip().split("\r")[-1]
    assert f"{total}/{total}" in last
    assert "100%" in last
    assert "epoch=1.00" in last


def test_a_progress_bar_starts_at_the_restored_progress():
    first = loader()
    list(islice(first, 9))
    second = loader()
    second.load_state_dict(first.state_dict())
    written = io.StringIO()
    next(progress_bar(second, unit="item", total=300, file=written, mininterval=0, unit_scale=False))
    assert f"{first.progress.items}/300" in written.getvalue()


def test_a_progress_bar_of_a_stream():
    stream = LengthBatchStream(ListSource(ITEMS), BatchPlanner(128), window=50)
    written = io.StringIO()
    assert sum(len(batch) for batch in progress_bar(stream, unit="item", file=written)) == 300


def test_a_progress_bar_without_standard_error():
    """tqdm raised an AttributeError: standard error is None under `2>&-`, pythonw, and in some services."""
    program = """
import sys
from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler, progress_bar

assert sys.stderr is None
bar = progress_bar(LengthBatchSampler([1] * 30, BatchPlanner(3)), unit="item", total=30)
print(sum(map(len, bar)))
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, program]
    root = Path(__file__).parents[2]
    assert subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True).stdout == "30\n"


def test_bad_loaders():
    with pytest.raises(ValueError, match="batch_sampler must be a LengthBatchSampler or LengthBatchStream"):
        ResumableLoader(DataLoader(ITEMS))
    sampler = LengthBatchSampler(LENGTHS, BatchPlanner(128))
    with pytest.raises(ValueError, match="loader must have in_order=True"):
        ResumableLoader(DataLoader(ITEMS, batch_sampler=sampler, in_order=False))
