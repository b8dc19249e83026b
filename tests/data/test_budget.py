"""Collated batches are what was planned: within the budget of tokens, of items as long as they were counted."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    PackedCollator,
    PaddedCollator,
    PieceDataset,
    Prepare,
    ResumableLoader,
    cut_item,
)

from .made import ListSource

LENGTHS = [1, 3, 5, 7, 9, 30]
ITEMS = [torch.full((length,), number) for number, length in enumerate(LENGTHS)]


def loader(rule, collate_fn, lengths=LENGTHS, dataset=ITEMS, num_workers=0):
    sampler = LengthBatchSampler(lengths, BatchPlanner(**rule), shuffle=False)
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=num_workers)


def resumable(rule, collator, lengths, items, **workers):
    return ResumableLoader(loader(rule, collator, lengths, items, **workers))


def prepared(rule, collator, lengths, items):
    return resumable(rule, Prepare(collator, dataset=items), lengths, ItemDataset())


def torchdata_loader(rule, collator, lengths, items):
    pytest.importorskip("torchdata.nodes")
    from seqwarm_kernels.data.torchdata_nodes import batch_loader

    return batch_loader(LengthBatchSampler(lengths, BatchPlanner(**rule)), Prepare(collator, dataset=items))


LOADERS = [resumable, prepared, torchdata_loader]


@pytest.mark.parametrize("make", LOADERS)
@pytest.mark.parametrize(
    ("rule", "collator", "lengths", "found"),
    [
        ({"max_tokens": 30, "packed": True}, PackedCollator(), [15] * 4, "30, got 32"),
        ({"max_tokens": 30}, PaddedCollator(), [15] * 4, "30, got 32"),
        ({"max_tokens": 48, "packed": True}, PaddedCollator(), [16, 16, 8, 8], "48, got 64"),  # pads
        ({"max_tokens": 32}, PaddedCollator(multiple_of=24), [16] * 4, "32, got 48"),  # pads further than the planner
        ({"max_tokens": 32}, PaddedCollator(max_tokens=31), [16] * 4, "31, got 32"),  # has a budget of its own
        ({"max_tokens": 32, "packed": True}, PackedCollator(max_tokens=31), [16] * 4, "31, got 32"),
    ],
)
def test_a_batch_beyond_the_budget_is_an_error(make, rule, collator, lengths, found):
    batches = make(rule, collator, lengths, [[1] * max(length, 16 if 15 in lengths else 0) for length in lengths])
    before = batches.state_dict()
    with pytest.raises(ValueError, match=f"max_tokens, {found}"):
        next(iter(batches))
    assert batches.state_dict() == before


@pytest.mark.parametrize("make", LOADERS)
def test_batches_without_a_budget(make):
    batches = list(make({"batch_size": 2}, PackedCollator(), LENGTHS, ITEMS))
    assert sum(batch["input_ids"].numel() for batch in batches) == sum(LENGTHS)


def test_in_a_worker_and_with_a_collator_of_your_own():
    for collator, workers in ((PaddedCollator(), {"num_workers": 1}), (lambda items: PaddedCollator()(items), {})):
        with pytest.raises(ValueError, match="max_tokens, 30, got 32"):
            next(iter(resumable({"max_tokens": 30}, collator, [15] * 4, [[1] * 16] * 4, **workers)))
    batches = resumable({"max_tokens": 30}, torch.stack, [15] * 4, [torch.ones(16)] * 4)
    assert [batch.shape for batch in batches] == [(2, 16)] * 2  # other inputs are not counted


def test_pieces_need_a_piece_dataset():
    """A Piece is no index, and not taken for three of them."""
    for dataset in (ITEMS, tuple(ITEMS), torch.arange(48).reshape(6, 8), np.arange(48).reshape(6, 8)):
        with pytest.raises((TypeError, IndexError)):
            list(loader({"max_tokens": 20, "too_long": "truncate"}, PaddedCollator(), dataset=dataset))


# ---- lengths that were counted too short: ends of items were cut without a word, as if they were too long


def batches_of(items, lengths, rule, cut=cut_item):
    return loader(rule, PaddedCollator(), lengths, PieceDataset(items, cut=cut))


SCHEDULER = SequenceLengthScheduler(4, 8, duration=100, step_size=1)


@pytest.mark.parametrize("as_mapping", [False, True])
@pytest.mark.parametrize(
    ("rule", "length", "counted", "width"),
    [
        *(({"max_tokens": 32, "max_length": 10, "too_long": each}, 8, 8, 8) for each in ("truncate", "split")),
        *(({"max_tokens": 32, "max_length": 10, "too_long": each}, 8, 7, None) for each in ("truncate", "split")),
        ({"batch_size": 1, "max_length": 4, "too_long": "split"}, 11, 10, None),  # seen at the last piece
        ({"batch_size": 1, "too_long": "truncate"}, 4, 3, None),
        *(({"batch_size": 1, "max_length": 4, "too_long": "truncate"}, 6, counted, 4) for counted in (4, 5, 6)),
        ({"max_tokens": 8, "max_length": SCHEDULER, "too_long": "truncate"}, 6, 4, None),
        # Only "cut" takes no more than the current length, 4 here, of an item.
        ({"max_tokens": 8, "max_length": SCHEDULER, "warmup": "cut", "too_long": "truncate"}, 6, 4, 4),
    ],
)
def test_items_that_are_cut(rule, length, counted, width, as_mapping):
    item = {"input_ids": [1] * length} if as_mapping else [1] * length
    batches = batches_of([item], [counted], rule)
    if width is None:
        with pytest.raises(ValueError, match=f"item 0 .* {counted} tokens .* got {length}"):
            list(batches)
    else:
        assert next(iter(batches))["input_ids"].shape == (1, width)


def test_a_cut_of_your_own_is_not_checked():
    batches = batches_of([[1] * 4], [3], {"max_tokens": 8, "too_long": "truncate"}, cut=lambda *cut: cut_item(*cut))
    assert next(iter(batches))["input_ids"].shape == (1, 3)


def test_a_transform_that_adds_a_token():
    def batches(transform):
        planner = BatchPlanner(8, too_long="truncate")
        stream = LengthBatchStream(ListSource(["abc", "de"]), planner, length=len, shuffle=False)
        return DataLoader(
            ItemDataset(), batch_sampler=stream, collate_fn=Prepare(PaddedCollator(), transform=transform)
        )

    assert next(iter(batches(lambda text: list(text.encode()))))["input_ids"].shape == (2, 3)
    with pytest.raises(ValueError, match="abc"):
        list(batches(lambda text: [*text.encode(), 0]))


# ---- as many lengths as items: items without a length were never served


class Unsized(Dataset):
    def __getitem__(self, index):
        return [index + 1] * 3


class Sized(Unsized):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size


class NotCountedYet(Unsized):
    def __len__(self):
        raise RuntimeError("call setup() first")


def cut(rule, collator, lengths, items):
    return resumable({**rule, "too_long": "truncate"}, collator, lengths, PieceDataset(items))


@pytest.mark.parametrize("make", [*LOADERS, cut])
def test_the_number_of_items(make):
    for size in (2, 4):
        with pytest.raises(ValueError, match=f"dataset .* 3, got {size}"):
            make({"max_tokens": 8}, PaddedCollator(), [3] * 3, Sized(size))
    for dataset in (Sized(3), Subset(Sized(5), [0, 3, 4]), Unsized(), NotCountedYet(), [[1] * 3] * 3):
        batches = make({"max_tokens": 8}, PaddedCollator(), [3] * 3, dataset)
        assert sum(len(batch["input_ids"]) for batch in batches) == 3
