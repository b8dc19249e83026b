"""Pieces of items: how they are cut, and datasets that do not cut them."""

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    PaddedCollator,
    Piece,
    PieceDataset,
    Prepare,
    cut_item,
)


class Pair(NamedTuple):
    ids: Any
    label: Any


class TestPieces:
    def test_every_entry_as_long_as_the_ids_is_cut(self):
        item = {"input_ids": [1, 2, 3], "labels": torch.tensor([4, 5, 6]), "name": "abc", "weight": 2, "more": [1, 2]}
        cut = cut_item(item, 1, 2)
        assert cut["labels"].tolist() == [5, 6]
        assert {name: cut[name] for name in ("input_ids", "name", "weight", "more")} == {
            "input_ids": [2, 3],
            "name": "abc",
            "weight": 2,
            "more": [1, 2],
        }

    def test_sequences(self):
        assert cut_item([1, 2, 3], 1, 1) == [2]
        assert cut_item(torch.tensor([1, 2, 3]), 0, 2).tolist() == [1, 2]

    def test_every_entry_of_a_tuple_as_long_as_the_first_one_is_cut(self):
        """The tuple itself was cut: its first entries were left, each as a whole."""
        ids, labels = torch.tensor([1, 2, 3]), [4, 5, 6]
        cut = cut_item((ids, labels, np.array([7, 8]), "abc", 3, torch.tensor(4)), 1, 1)
        assert [cut[0].tolist(), cut[1], cut[2].tolist(), *cut[3:]] == [[2], [5], [7, 8], "abc", 3, torch.tensor(4)]
        assert type(cut) is tuple
        assert cut_item(Pair([1, 2, 3], 9), 0, 2) == Pair([1, 2], 9)
        assert type(cut_item(Pair([1, 2, 3], 9), 0, 2)) is Pair
        assert cut_item([[1, 2, 3], [4, 5, 6]], 0, 2) == [[1, 2], [4, 5]]
        assert cut_item(({"input_ids": [1, 2, 3], "name": "a"}, [4, 5, 6], 7), 2, 5) == (
            *({"input_ids": [3], "name": "a"}, [6], 7),
        )

    def test_tuples_of_tokens(self):
        assert cut_item((1, 2, 3), 1, 2) == (2, 3)
        assert cut_item(["a", "word"], 0, 1) == ["a"]
        assert cut_item([torch.tensor(1), torch.tensor(2)], 0, 1) == [torch.tensor(1)]
        assert cut_item((), 0, 1) == ()

    def test_a_data_set_of_tuples(self):
        """With too_long="truncate", whole items of 64 tokens were served."""
        rows = torch.arange(4 * 64).reshape(4, 64)
        sampler = LengthBatchSampler([64] * 4, BatchPlanner(64, max_length=8, too_long="truncate"), shuffle=False)
        (batch,) = DataLoader(PieceDataset(TensorDataset(rows, rows)), batch_sampler=sampler)
        assert torch.equal(torch.stack(batch), torch.stack([rows[:, :8]] * 2))
        short = LengthBatchSampler([63] * 4, BatchPlanner(64, too_long="truncate"))
        with pytest.raises(ValueError, match=r"item . must have the 63 tokens that its length says, got 64"):
            next(iter(DataLoader(PieceDataset(TensorDataset(rows, rows)), batch_sampler=short)))

    @pytest.mark.parametrize(
        ("make", "got"),
        [(torch.tensor, r"shape \(1, 3\)"), (np.array, r"shape \(1, 3\)"), (list, "a list of rows")],
    )
    def test_ids_of_several_dimensions(self, make, got):
        """The rows were cut for tokens: an item of tokenizer(text, return_tensors="pt") stayed whole."""
        item = {"input_ids": make([[1, 2, 3]])}
        for cut in (cut_item, lambda item, *_: Prepare(PaddedCollator())([Piece(item, 0, 1)])):
            with pytest.raises(ValueError, match=f"input_ids of an item must have one dimension, got {got}: squeeze"):
                cut(item, 0, 1)

    def test_a_dataset_accepts_pieces_and_indices(self):
        dataset = PieceDataset([[1, 2, 3], [4, 5]])
        assert len(dataset) == 2
        assert dataset[0] == [1, 2, 3]
        assert dataset[Piece(0, 1, 2)] == [2, 3]
        assert dataset.__getitems__([Piece(1, 0, 1), 0]) == [[4], [1, 2, 3]]
        assert dataset.__getitems__([]) == []

    @pytest.mark.parametrize("wrapped", [PieceDataset, lambda many: Prepare(list, dataset=many)])
    def test_a_batch_is_fetched_at_once_if_the_dataset_can(self, wrapped):
        class Many:
            asked = ()

            def __len__(self):
                return 9

            def __getitems__(self, indices):
                self.asked += (indices,)
                return [[index] * 3 for index in indices]

        many = Many()
        take = getattr(wrapped(many), "__getitems__", wrapped(many))
        assert take([Piece(4, 1, 1), 2]) == [[4], [2, 2, 2]]
        assert many.asked == ([4, 2],)


def test_what_remains_of_a_tuple():
    piece = Piece(3, 1, 2)
    assert piece == Piece(3, 1, 2, item_end=3)
    assert len({piece, Piece(3, 1, 2, item_end=3)}) == 1
    assert Piece(2, 5, 5) < piece < Piece(3, 2, 0)
    assert pickle.loads(pickle.dumps(Piece(3, 1, 2, 3))).item_end == 3
