"""The budget of tokens holds for collated batches: planner, lengths, dataset and collator must fit together."""

import re

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

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


LONGER = re.escape(
    "lengths must count the tokens of items as they are collated, at most 15 in this batch, got an item of 30"
)
OVER = re.escape("max_tokens is 30, got a batch of 60 tokens: items are longer than planned, so their lengths were")


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_lengths_that_were_counted_too_short(packed, num_workers):
    collator = PackedCollator() if packed else PaddedCollator()
    items = [[1] * 30] * 4
    plain = loader({"max_tokens": 30, "packed": packed}, collator, [15] * 4, items, num_workers)
    batches = ResumableLoader(plain)
    before = batches.state_dict()
    with pytest.raises(ValueError, match=LONGER):
        next(iter(batches))
    assert batches.state_dict() == before


def test_lengths_that_were_counted_too_short_with_torchdata():
    prepare = Prepare(PaddedCollator(), dataset=[[1] * 30] * 4)
    with pytest.raises(ValueError, match=LONGER):
        list(torchdata_loader({"max_tokens": 30}, prepare, [15] * 4))


def test_a_collator_that_pads_further_than_the_planner():
    batches = ResumableLoader(loader({"max_tokens": 30}, PaddedCollator(multiple_of=32)))
    with pytest.raises(ValueError, match=r"got a batch of 96 tokens: .* pads otherwise than the planner"):
        list(batches)


@pytest.mark.parametrize(
    "collate",
    [
        torch.stack,
        lambda items: {"idx": torch.stack(items)},
        lambda items: (torch.stack(items), torch.ones(4)),
        lambda items: [torch.stack(items), torch.ones(4)],
        lambda items: {"x": {"idx": torch.stack(items)}},
        lambda items: [torch.ones(2, 2, dtype=torch.int64), {"x": {"input_ids": torch.stack(items)}}],
    ],
)
def test_batches_without_input_ids(collate):
    """Only a mapping with input_ids was checked, then no list, which torch's collate_fn makes of a tuple."""
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
        lambda items: [item[:, 0] for item in items],
        lambda items: [item[:, 0].tolist() for item in items],
        lambda items: [["text"] * 4, 3, None],
        lambda items: None,
    ],
)
def test_longer_targets_and_other_tensors_are_not_counted(collate):
    items = [torch.ones(31, 8, dtype=torch.int64)] * 4
    assert len(list(ResumableLoader(loader({"max_tokens": 30}, collate, [30] * 4, items)))) == 4


IDS = torch.ones(16, 64, dtype=torch.int64)


@pytest.mark.parametrize("make", [lambda ids: (ids, ids), lambda ids: {"pair": (ids, ids)}, lambda ids: {"ids": ids}])
def test_what_torch_collates(make):
    """Its collate_fn makes a list of a tuple. A list was not checked: 512 tokens came of a budget of 64."""
    items = [make(ids) for ids in IDS]
    rule = {"max_tokens": 64}
    with pytest.raises(
        ValueError, match=r"lengths must count .* at most 8 in this batch, got an item of 64: count its inp"
    ):
        next(iter(ResumableLoader(loader(rule, None, [8] * 16, items))))
    assert len(list(ResumableLoader(loader(rule, None, [64] * 16, items)))) == 16
    assert len(list(torchdata_loader(rule, Prepare(default_collate, dataset=items), [64] * 16))) == 16
    with pytest.raises(ValueError, match=r"lengths must count .* got an item of 64"):
        next(iter(torchdata_loader(rule, Prepare(default_collate, dataset=items), [8] * 16)))
    with pytest.raises(ValueError, match="max_tokens is 64, got a batch of 512 tokens"):
        next(iter(torchdata_loader(rule, lambda indices: default_collate([items[i] for i in indices]), [8] * 16)))


@pytest.mark.parametrize(
    ("collate", "rule"),
    [
        (None, {"batch_size": 2}),
        (None, {"batch_size": 2, "multiple_of": 4}),
        (PaddedCollator(), {"batch_size": 2}),
        (PaddedCollator(multiple_of=4), {"batch_size": 2, "multiple_of": 4}),
        (PackedCollator(), {"max_tokens": 64, "packed": True}),
    ],
)
def test_items_that_are_longer_than_planned(collate, rule):
    """Without max_tokens, and within it, no error said so. Shorter items may have been counted with an upper bound."""
    items = [{"input_ids": [1] * 9} if collate else {"input_ids": torch.ones(9, dtype=torch.int64)}] * 4
    with pytest.raises(
        ValueError, match=r"lengths must count .* got an item of 9: count its input_ids, with tokens that"
    ):
        next(iter(ResumableLoader(loader(rule, collate, [1] * 4, items))))
    for length in (9, 11):
        assert len(list(ResumableLoader(loader(rule, collate, [length] * 4, items)))) == (1 if "packed" in rule else 2)


def test_a_dataset_may_pad_whole_items_to_the_planned_width():
    items = torch.ones(4, 12, dtype=torch.int64)
    rule = {"batch_size": 2, "multiple_of": 4}
    assert len(list(ResumableLoader(loader(rule, None, [9] * 4, items)))) == 2
    with pytest.raises(ValueError, match="at most 8 in this batch, got an item of 12"):
        next(iter(ResumableLoader(loader(rule, None, [8] * 4, items))))


@pytest.mark.parametrize("remainder", ["repeat", "empty"])
def test_the_last_batches_of_an_epoch_are_planned_ones(remainder):
    """Repeated batches have a length of their own, and empty ones have none."""
    for rank in range(2):
        sampler = LengthBatchSampler(LENGTHS, BatchPlanner(batch_size=2), rank=rank, world_size=2, remainder=remainder)
        plain = DataLoader(ITEMS, batch_sampler=sampler, collate_fn=PaddedCollator())
        assert len(list(ResumableLoader(plain))) == 2


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
