"""Items through Prepare and PieceDataset: only tokens are cut, and a warning says where no label is left."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    PackedCollator,
    PaddedCollator,
    Piece,
    PieceDataset,
    Prepare,
)
from seqwarm_kernels.data.batch_planning.plan import TRUNCATED

from .made import cut_planner


def test_prepare():
    prepare = Prepare(PaddedCollator(), transform=lambda text: [ord(letter) for letter in text])
    assert prepare(["ab", Piece("xyz", 1, 1)])["input_ids"].tolist() == [[97, 98], [121, 0]]
    prepare = Prepare(PackedCollator(), dataset=[[1, 2, 3], [4]])
    assert prepare([Piece(0, 2, 1), 1])["input_ids"].tolist() == [[3, 4]]
    assert prepare([])["input_ids"].tolist() == [[0]]
    assert Prepare(list, cut=lambda item, start, length: (item, start, length))([Piece("a", 1, 2)]) == [("a", 1, 2)]


@pytest.mark.parametrize("text", ["a text", b"a text"])
@pytest.mark.parametrize("make", [lambda text: text, lambda text: {"input_ids": text}], ids=["text", "mapping"])
def test_characters_are_not_cut_for_tokens(make, text):
    planner = BatchPlanner(8, max_length=4, too_long="truncate")
    for lengths in ([6], [3]):
        (batch,) = LengthBatchSampler(lengths, planner)
        for cut in (Prepare(list, dataset=[make(text)]), PieceDataset([make(text)]).__getitems__):
            with pytest.raises(TypeError, match=r"to cut must hold tokens, got b?'a text', whose characters"):
                cut(batch)


class TestLabelsBehindTheCut:
    """Each item is cut by itself. One whose labels were all behind the cut was trained on nothing, without a word."""

    MESSAGE = "no label of an item is left after its cut to 2 tokens, so the model learns nothing from it"

    @staticmethod
    def item(prompt, make):
        return {"input_ids": make([1] * 6), "labels": make([-100] * prompt + [1] * (6 - prompt))}

    def batches(self, items, planner, with_prepare=False):
        sampler = LengthBatchSampler([6] * len(items), planner, shuffle=False)
        prepare = Prepare(PaddedCollator(), dataset=items)
        dataset, collate = (ItemDataset(), prepare) if with_prepare else (PieceDataset(items), PaddedCollator())
        return DataLoader(dataset, batch_sampler=sampler, collate_fn=collate)

    @pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
    @pytest.mark.parametrize("with_prepare", [False, True])
    @pytest.mark.parametrize("planner", [cut_planner(), BatchPlanner(8, max_length=2, too_long="truncate")])
    def test_a_warning_once(self, planner, with_prepare, make):
        batches = self.batches([self.item(3, make)] * 8, planner, with_prepare)
        with pytest.warns(UserWarning, match=self.MESSAGE) as caught:
            list(batches)
        assert len(caught) == 1
        assert caught[0].filename == __file__

    def test_one_item_of_a_batch(self):
        items = [self.item(1, list)] * 3 + [self.item(3, list)]
        with pytest.warns(UserWarning, match=self.MESSAGE):
            list(self.batches(items, BatchPlanner(8, max_length=2, too_long="truncate")))

    @pytest.mark.parametrize(
        "planner", [cut_planner(too_long="split"), BatchPlanner(8, max_length=2, too_long="split"), BatchPlanner(12)]
    )
    @pytest.mark.filterwarnings("error")
    def test_split_and_whole_items_lose_nothing(self, planner):
        list(self.batches([self.item(3, list)] * 8, planner))

    @pytest.mark.parametrize(
        "item",
        [
            {"input_ids": [1] * 6, "labels": [-100] + [1] * 5},
            {"input_ids": [1] * 6, "labels": [-100] * 6},
            {"input_ids": [1] * 6, "labels": None},
            {"input_ids": [1] * 6},
            [1] * 6,
        ],
    )
    @pytest.mark.filterwarnings("error")
    def test_items_that_lose_no_or_not_all_labels(self, item):
        list(self.batches([item] * 8, BatchPlanner(8, max_length=2, too_long="truncate")))

    @pytest.mark.filterwarnings("error")
    def test_only_the_first_items_are_looked_at(self):
        items = [self.item(1, list)] * 500 + [self.item(3, list)]
        list(self.batches(items, BatchPlanner(8, max_length=2, too_long="truncate")))


class TestLabelsOfTuples:
    """An item whose labels are all behind its cut was trained on nothing. Only those of mappings were looked at."""

    @staticmethod
    def cut(item):
        return PieceDataset([item])[Piece(0, 0, 2, TRUNCATED)]

    @pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
    @pytest.mark.parametrize(
        "item_of",
        [
            lambda ids, labels: (ids, labels),
            lambda ids, labels: [ids, labels],
            lambda ids, labels: (ids, "name", [1] * 6, labels, 7),
            lambda ids, labels: ({"input_ids": ids, "labels": labels}, 7),
            lambda ids, labels: ({"input_ids": ids}, labels),
        ],
    )
    def test_a_warning(self, item_of, make):
        with pytest.warns(UserWarning, match="no label of an item is left after its cut to 2 tokens"):
            self.cut(item_of(make([1] * 6), make([-100] * 3 + [1] * 3)))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("entry", [[-100] + [1] * 5, [-100] * 6, [np.ones(2)] * 6, [-100, -100, 1], "abcdef", 7])
    def test_items_that_lose_no_or_not_all_labels(self, entry):
        assert self.cut(([1] * 6, entry))[0] == [1, 1]
