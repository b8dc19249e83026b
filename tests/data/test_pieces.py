"""Pieces of items: how they are cut, and data sets that cut them."""

import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from seqwarm_kernels.data import (
    BatchPlanner,
    LengthBatchSampler,
    PackedCollator,
    PaddedCollator,
    Piece,
    PieceDataset,
    Prepare,
    cut_item,
)


class Pair(NamedTuple):
    ids: Any
    label: Any


def plain(value):
    """The same without tensors and arrays."""
    if isinstance(value, dict):
        return {name: plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(*map(plain, value)) if isinstance(value, Pair) else type(value)(map(plain, value))
    return value.tolist() if hasattr(value, "tolist") else value


@pytest.mark.parametrize(
    ("item", "cut"),
    [
        ([1, 2, 3], [2, 3]),
        ((1, 2, 3), (2, 3)),
        (torch.tensor([1, 2, 3]), [2, 3]),
        (["a", "word", "more"], ["word", "more"]),
        ([torch.tensor(1), torch.tensor(2)], [2]),
        ((), ()),
        # Every entry that is as long as the ids is cut. A tuple itself was cut: its first entries were left whole.
        (
            {"input_ids": [1, 2, 3], "labels": torch.tensor([4, 5, 6]), "name": "abc", "weight": 2, "more": [1, 2]},
            {"input_ids": [2, 3], "labels": [5, 6], "name": "abc", "weight": 2, "more": [1, 2]},
        ),
        (
            (torch.tensor([1, 2, 3]), [4, 5, 6], np.array([7, 8]), "abc", 3, torch.tensor(4)),
            ([2, 3], [5, 6], [7, 8], "abc", 3, 4),
        ),
        (Pair([1, 2, 3], 9), Pair([2, 3], 9)),
        ([[1, 2, 3], [4, 5, 6]], [[2, 3], [5, 6]]),
        (({"input_ids": [1, 2, 3], "name": "a"}, [4, 5, 6], 7), ({"input_ids": [2, 3], "name": "a"}, [5, 6], 7)),
    ],
)
def test_what_is_cut(item, cut):
    found = plain(cut_item(item, 1, 2))
    assert found == cut
    assert type(found) is type(cut)


def test_a_data_set_of_tuples():
    """With too_long="truncate", whole items of 64 tokens were served."""
    rows = torch.arange(4 * 64).reshape(4, 64)
    dataset = PieceDataset(TensorDataset(rows, rows))
    sampler = LengthBatchSampler([64] * 4, BatchPlanner(64, max_length=8, too_long="truncate"), shuffle=False)
    (batch,) = DataLoader(dataset, batch_sampler=sampler)
    assert torch.equal(torch.stack(batch), torch.stack([rows[:, :8]] * 2))


@pytest.mark.parametrize("make", [torch.tensor, np.array, list])
def test_ids_of_several_dimensions(make):
    """The rows were cut for tokens: an item of tokenizer(text, return_tensors="pt") stayed whole."""
    item = {"input_ids": make([[1, 2, 3]])}
    for cut in (cut_item, lambda item, *_: Prepare(PaddedCollator())([Piece(item, 0, 1)])):
        with pytest.raises(ValueError, match="input_ids"):
            cut(item, 0, 1)


@pytest.mark.parametrize("text", ["a text", b"a text"])
@pytest.mark.parametrize("make", [lambda text: text, lambda text: {"input_ids": text}, lambda text: (text, 3)])
def test_characters_are_not_cut_for_tokens(make, text):
    item = make(text)
    for use in (
        lambda: cut_item(item, 0, 1),
        lambda: Prepare(list, dataset=[item])([Piece(0, 0, 4, 6)]),
        lambda: PieceDataset([item]).__getitems__([Piece(0, 0, 3)]),
    ):
        with pytest.raises(TypeError, match=r"item.* b?'a text', whose characters"):
            use()


@pytest.mark.parametrize("wrapped", [PieceDataset, lambda many: Prepare(list, dataset=many)])
def test_a_batch_is_fetched_at_once_if_the_dataset_can(wrapped):
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


def test_a_dataset_accepts_pieces_and_indices():
    dataset = PieceDataset([[1, 2, 3], [4, 5]])
    assert (len(dataset), dataset[0], dataset[Piece(0, 1, 2)]) == (2, [1, 2, 3], [2, 3])
    assert dataset.__getitems__([Piece(1, 0, 1), 0]) == [[4], [1, 2, 3]]
    assert dataset.__getitems__([]) == []
    piece = Piece(3, 1, 2)
    assert {piece, pickle.loads(pickle.dumps(piece))} == {Piece(3, 1, 2, item_end=3)}
    assert Piece(2, 5, 5) < piece < Piece(3, 2, 0)


def test_prepare():
    prepare = Prepare(PaddedCollator(), transform=lambda text: [ord(letter) for letter in text])
    assert prepare(["ab", Piece("xyz", 1, 1)])["input_ids"].tolist() == [[97, 98], [121, 0]]
    prepare = Prepare(PackedCollator(), dataset=[[1, 2, 3], [4]])
    assert prepare([Piece(0, 2, 1), 1])["input_ids"].tolist() == [[3, 4]]
    assert prepare([])["input_ids"].tolist() == [[0]]
    assert Prepare(list, cut=lambda item, start, length: (item, start, length))([Piece("a", 1, 2)]) == [("a", 1, 2)]
