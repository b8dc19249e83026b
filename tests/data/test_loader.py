"""DataLoaders with workers: states count the yielded batches only."""

import io
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

from .made import ListSource

LENGTHS = np.random.default_rng(3).integers(1, 60, 300)
ITEMS = [torch.full((int(length),), number) for number, length in enumerate(LENGTHS)]


def loader(num_workers=0, *, too_long="reject", max_tokens=128, **options):
    planner = BatchPlanner(max_tokens, too_long=too_long)
    sampler = LengthBatchSampler(LENGTHS, planner, window=50, **options)
    dataset = PieceDataset(ITEMS) if planner.cuts_items else ITEMS
    collator = PaddedCollator(max_tokens=max_tokens)
    return ResumableLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=collator, num_workers=num_workers))


def stream_loader(num_workers=0, *, max_tokens=128, **options):
    stream = LengthBatchStream(ListSource(ITEMS), BatchPlanner(max_tokens, **options), window=50)
    prepare = Prepare(PaddedCollator())
    return ResumableLoader(DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=prepare, num_workers=num_workers))


def numbers(batches):
    """The items of each batch. The tokens of an item are its number."""
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


UNINTERRUPTED = numbers(loader())


@pytest.mark.parametrize("make", [loader, stream_loader])
def test_pieces(make):
    batches = list(make(1, too_long="split", max_tokens=32))
    assert sum(int(batch["attention_mask"].sum()) for batch in batches) == LENGTHS.sum()
    assert all(batch["input_ids"].numel() <= 32 for batch in batches)


def test_a_stream_needs_a_dataset_of_items():
    """Items that are tensors would index the dataset."""
    stream = LengthBatchStream(ListSource(ITEMS), BatchPlanner(128), window=50)
    with pytest.raises(ValueError, match="dataset"):
        ResumableLoader(DataLoader(ITEMS, batch_sampler=stream, collate_fn=PaddedCollator()))


@pytest.mark.parametrize("make", [loader, stream_loader])
def test_an_older_iterator_is_invalid(make):
    batches = make()
    older = iter(batches)
    next(older)
    newer = iter(batches)
    next(newer)
    with pytest.raises(RuntimeError, match="iterator is invalid"):
        next(older)
    next(newer)
    batches.load_state_dict(make().state_dict())
    with pytest.raises(RuntimeError, match="iterator is invalid"):
        next(newer)
    assert numbers(batches) == numbers(make())


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
    with pytest.raises(ValueError, match="batch_sampler"):
        ResumableLoader(DataLoader(ITEMS))
    sampler = LengthBatchSampler(LENGTHS, BatchPlanner(128))
    with pytest.raises(ValueError, match="in_order"):
        ResumableLoader(DataLoader(ITEMS, batch_sampler=sampler, in_order=False))
