"""The budget of tokens holds for collated batches: loaders and collators check what the planner says."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    PackedCollator,
    PaddedCollator,
    Prepare,
    ResumableLoader,
)

LENGTHS = [1, 3, 5, 7, 9, 30]
ITEMS = [torch.full((length,), number) for number, length in enumerate(LENGTHS)]


def loader(rule, collate_fn, lengths=LENGTHS, dataset=ITEMS, num_workers=0):
    sampler = LengthBatchSampler(lengths, BatchPlanner(**rule))
    return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate_fn, num_workers=num_workers)


def resumable(rule, collator, lengths, items):
    return ResumableLoader(loader(rule, collator, lengths, items))


def prepared(rule, collator, lengths, items):
    return ResumableLoader(loader(rule, Prepare(collator, dataset=items), lengths, range(len(items))))


def torchdata_loader(rule, collator, lengths, items):
    pytest.importorskip("torchdata.nodes")
    from seqwarm_kernels.data.torchdata_nodes import batch_loader

    return batch_loader(LengthBatchSampler(lengths, BatchPlanner(**rule)), Prepare(collator, dataset=items))


@pytest.mark.parametrize("make", [resumable, prepared, torchdata_loader])
class TestCollatorsOfThisPackage:
    @pytest.mark.parametrize("packed", [True, False])
    def test_lengths_that_were_counted_too_short(self, make, packed):
        collator = PackedCollator() if packed else PaddedCollator()
        rule, items = {"max_tokens": 30, "packed": packed}, [[1] * 16] * 4
        batches = make(rule, collator, [15] * 4, items)
        before = batches.state_dict()
        with pytest.raises(ValueError, match="a batch must have at most max_tokens, 30, got 32: items are longer"):
            next(iter(batches))
        assert batches.state_dict() == before
        assert len(list(make(rule, collator, [16] * 4, items))) == 4

    def test_a_collator_that_pads_packs(self, make):
        items = [[1] * length for length in (20, 5, 5)]
        with pytest.raises(ValueError, match=r"max_tokens, 30, got 60: .* or the planner has another packed"):
            list(make({"max_tokens": 30, "packed": True}, PaddedCollator(), [20, 5, 5], items))

    def test_a_collator_that_pads_further_than_the_planner(self, make):
        with pytest.raises(ValueError, match="max_tokens, 30, got 96"):
            list(make({"max_tokens": 30}, PaddedCollator(multiple_of=32), LENGTHS, ITEMS))

    def test_a_budget_of_its_own(self, make):
        with pytest.raises(ValueError, match="max_tokens, 29, got 30"):
            list(make({"max_tokens": 30}, PaddedCollator(max_tokens=29), LENGTHS, ITEMS))

    def test_no_budget(self, make):
        batches = list(make({"batch_size": 2}, PackedCollator(), LENGTHS, ITEMS))
        assert sum(batch["input_ids"].numel() for batch in batches) == sum(LENGTHS)


def test_in_a_worker():
    batches = ResumableLoader(loader({"max_tokens": 30}, PaddedCollator(), [15] * 4, [[1] * 16] * 4, 1))
    with pytest.raises(ValueError, match="max_tokens, 30, got 32"):
        next(iter(batches))


def test_a_collator_of_your_own():
    with pytest.raises(ValueError, match="max_tokens, 30, got 32"):
        list(resumable({"max_tokens": 30}, lambda items: PaddedCollator()(items), [15] * 4, [[1] * 16] * 4))
    batches = ResumableLoader(loader({"max_tokens": 30}, torch.stack, [15] * 4, [torch.ones(16)] * 4))
    assert [batch.shape for batch in batches] == [(2, 16)] * 2


@pytest.mark.parametrize("dataset", [ITEMS, tuple(ITEMS), torch.arange(48).reshape(6, 8), np.arange(48).reshape(6, 8)])
def test_pieces_need_a_piece_dataset(dataset):
    """A Piece is no index, and not taken for three of them."""
    cuts = {"max_tokens": 20, "too_long": "truncate"}
    with pytest.raises((TypeError, IndexError)):
        list(loader(cuts, PaddedCollator(), dataset=dataset))


def test_pieces_need_a_piece_dataset_with_hugging_face():
    datasets = pytest.importorskip("datasets")
    dataset = datasets.Dataset.from_dict({"input_ids": [[1] * length for length in LENGTHS]})
    with pytest.raises(TypeError):
        list(loader({"max_tokens": 20, "too_long": "truncate"}, PaddedCollator(), dataset=dataset))
