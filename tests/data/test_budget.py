"""The budget of tokens holds for collated batches: planner, lengths, dataset and collator must fit together."""

import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    PackedCollator,
    PaddedCollator,
    PieceDataset,
    Prepare,
    ResumableLoader,
)

LENGTHS = [1, 3, 5, 7, 9, 30]
ITEMS = [torch.full((length,), number) for number, length in enumerate(LENGTHS)]


def loader(rule, collate_fn, lengths=LENGTHS, dataset=ITEMS, num_workers=0):
    sampler = LengthBatchSampler(lengths, BatchPlanner(**rule))
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=num_workers)


def torchdata_loader(rule, prepare, lengths=LENGTHS):
    pytest.importorskip("torchdata.nodes")
    from seqwarm_kernels.data.torchdata_nodes import batch_loader

    return batch_loader(LengthBatchSampler(lengths, BatchPlanner(**rule)), prepare)


@pytest.mark.parametrize("packed", [True, False])
def test_a_collator_of_the_other_kind(packed):
    rule = {"max_tokens": 30, "packed": packed}
    right, wrong = (PackedCollator(), PaddedCollator()) if packed else (PaddedCollator(), PackedCollator())
    message = f"must be a {type(right).__name__} for a planner with packed={packed}, got a {type(wrong).__name__}"
    for collate in (wrong, Prepare(wrong)):
        with pytest.raises(ValueError, match=f"collate_fn of loader {message}"):
            ResumableLoader(loader(rule, collate))
    with pytest.raises(ValueError, match=f"prepare {message}"):
        torchdata_loader(rule, Prepare(wrong, dataset=ITEMS))
    assert list(ResumableLoader(loader(rule, right)))
    assert list(torchdata_loader(rule, Prepare(right, dataset=ITEMS)))


def test_packed_batches_of_some_items_need_no_budget():
    batches = list(ResumableLoader(loader({"batch_size": 2}, PackedCollator())))
    assert sum(batch["input_ids"].numel() for batch in batches) == sum(LENGTHS)


OVER = re.escape("max_tokens is 30, got a batch of 60 tokens: items are longer than planned, so their lengths were")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_lengths_that_were_counted_too_short(packed, num_workers):
    collator = PackedCollator() if packed else PaddedCollator()
    items = [[1] * 30] * 4
    plain = loader({"max_tokens": 30, "packed": packed}, collator, [15] * 4, items, num_workers)
    batches = ResumableLoader(plain)
    before = batches.state_dict()
    with pytest.raises(ValueError, match=OVER):
        next(iter(batches))
    assert batches.state_dict() == before


def test_lengths_that_were_counted_too_short_with_torchdata():
    prepare = Prepare(PaddedCollator(), dataset=[[1] * 30] * 4)
    with pytest.raises(ValueError, match=OVER):
        list(torchdata_loader({"max_tokens": 30}, prepare, [15] * 4))


def test_a_collator_that_pads_further_than_the_planner():
    batches = ResumableLoader(loader({"max_tokens": 30}, PaddedCollator(multiple_of=32)))
    with pytest.raises(ValueError, match=r"got a batch of 96 tokens: .* pads otherwise than the planner"):
        list(batches)


@pytest.mark.parametrize(
    "collate",
    [torch.stack, lambda items: {"idx": torch.stack(items)}, lambda items: (torch.stack(items), torch.ones(4))],
)
def test_batches_without_input_ids(collate):
    """Only a mapping with input_ids was checked."""
    items = [torch.ones(30, dtype=torch.int64)] * 4
    with pytest.raises(ValueError, match=OVER):
        list(ResumableLoader(loader({"max_tokens": 30}, collate, [15] * 4, items)))
    assert len(list(ResumableLoader(loader({"max_tokens": 60}, collate, [30] * 4, items)))) == 2


@pytest.mark.parametrize(
    "collate",
    [
        lambda items: (torch.ones(1, 30, dtype=torch.int64), torch.ones(2, 30, dtype=torch.int64)),
        lambda items: {"input_ids": torch.ones(1, 30), "labels": torch.ones(2, 30, dtype=torch.int64)},
        lambda items: {"pixels": torch.ones(3, 30, 30), "idx": torch.ones(1, 30, dtype=torch.int64)},
        lambda items: items,
        lambda items: None,
    ],
)
def test_longer_targets_and_other_tensors_are_not_counted(collate):
    items = [torch.ones(31, 8, dtype=torch.int64)] * 4
    assert len(list(ResumableLoader(loader({"max_tokens": 30}, collate, [30] * 4, items)))) == 4


class Wrapped(Dataset):
    def __len__(self):
        return len(ITEMS)

    def __getitem__(self, index):
        return ITEMS[index]


CUTS = {"max_tokens": 20, "too_long": "truncate"}


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("dataset", [ITEMS, tuple(ITEMS), Wrapped()])
def test_pieces_need_a_piece_dataset(dataset, num_workers):
    with pytest.raises(TypeError, match="a Piece is part of an item, not an index: wrap the dataset in PieceDataset"):
        list(loader(CUTS, PaddedCollator(), dataset=dataset, num_workers=num_workers))


@pytest.mark.parametrize(
    "dataset",
    [ITEMS, tuple(ITEMS), dict(enumerate(ITEMS)), torch.ones(6, 30), TensorDataset(torch.ones(6, 30))],
)
def test_a_resumable_loader_notices_at_once(dataset):
    with pytest.raises(TypeError, match="dataset of loader must be a PieceDataset, because the planner may cut items"):
        ResumableLoader(loader(CUTS, PaddedCollator(), dataset=dataset))
    assert list(ResumableLoader(loader(CUTS, PaddedCollator(), dataset=PieceDataset(ITEMS))))


def test_pieces_need_a_piece_dataset_with_hugging_face():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in LENGTHS]})
    with pytest.raises(TypeError, match="wrap the dataset in PieceDataset"):
        list(loader(CUTS, PaddedCollator(), dataset=dataset))
