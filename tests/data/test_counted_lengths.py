"""Lengths that were counted before training: each is that of its item, and every item has one."""

import pytest
from torch.utils.data import DataLoader, Dataset, Subset

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.data import (
    BatchPlanner,
    ItemDataset,
    LengthBatchSampler,
    LengthBatchStream,
    PaddedCollator,
    PieceDataset,
    Prepare,
    ResumableLoader,
    cut_item,
)

from .made import ListSource


def batches_of(items, lengths, planner, as_mapping=False):
    items = [{"input_ids": item} for item in items] if as_mapping else items
    sampler = LengthBatchSampler(lengths, planner, shuffle=False)
    return DataLoader(PieceDataset(items), batch_sampler=sampler, collate_fn=PaddedCollator())


class TestLengthsThatWereCountedTooShort:
    """Items whose lengths leave out an end of text, say, were cut without a word, as if they were too long."""

    @pytest.mark.parametrize("as_mapping", [False, True])
    @pytest.mark.parametrize("too_long", ["truncate", "split"])
    def test_an_item_that_is_served_whole(self, too_long, as_mapping):
        items = [[1] * 5, [2] * 8, [3] * 6]
        planner = BatchPlanner(32, max_length=10, too_long=too_long)
        assert len(list(batches_of(items, [5, 8, 6], planner, as_mapping))) == 1
        with pytest.raises(ValueError, match="item 1"):
            list(batches_of(items, [5, 7, 6], planner, as_mapping))

    @pytest.mark.parametrize(
        ("length", "rule"),
        [(10, {"max_length": 4, "too_long": "split"}), (3, {"too_long": "truncate"})],
        ids=["the last piece", "without a maximum length"],
    )
    def test_an_item_that_is_longer_than_its_pieces(self, length, rule):
        with pytest.raises(ValueError, match="item 0"):
            list(batches_of([[1] * (length + 1)], [length], BatchPlanner(batch_size=1, **rule)))

    @pytest.mark.parametrize("counted", [4, 5, 6])
    def test_an_item_that_is_truncated_may_be_longer(self, counted):
        planner = BatchPlanner(batch_size=1, max_length=4, too_long="truncate")
        assert next(iter(batches_of([[1] * 6], [counted], planner)))["input_ids"].shape == (1, 4)

    @pytest.mark.parametrize(("warmup", "raises"), [("bucket", True), ("cut", False)])
    def test_under_warmup(self, warmup, raises):
        """Only "cut" takes no more than the current length, 4 here, of an item."""
        scheduler = SequenceLengthScheduler(4, 8, duration=100, step_size=1)
        batches = batches_of([[1] * 6], [4], BatchPlanner(8, max_length=scheduler, warmup=warmup, too_long="truncate"))
        if not raises:
            assert next(iter(batches))["input_ids"].shape == (1, 4)
            return
        with pytest.raises(ValueError, match="item 0"):
            next(iter(batches))

    def test_a_transform_that_adds_a_token(self):
        def loader(transform):
            planner = BatchPlanner(8, too_long="truncate")
            stream = LengthBatchStream(ListSource(["abc", "de"]), planner, length=len, shuffle=False)
            prepare = Prepare(PaddedCollator(), transform=transform)
            return DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=prepare)

        assert next(iter(loader(lambda text: list(text.encode()))))["input_ids"].shape == (2, 3)
        with pytest.raises(ValueError, match="abc"):
            list(loader(lambda text: [*text.encode(), 0]))

    def test_a_cut_of_your_own_is_not_checked(self):
        sampler = LengthBatchSampler([3], BatchPlanner(8, too_long="truncate"))
        dataset = PieceDataset([[1] * 4], cut=lambda item, start, length: cut_item(item, start, length))
        (batch,) = DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator())
        assert batch["input_ids"].shape == (1, 3)


class Sized(Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return [index + 1] * 3


class Unsized(Dataset):
    def __getitem__(self, index):
        return [index + 1] * 3


class NotCountedYet(Unsized):
    def __len__(self):
        raise RuntimeError("call setup() first")


class TestNumberOfLengths:
    """Items without a length were never served."""

    MESSAGE = r"dataset must have as many items as the sampler has lengths, 3, got {}"
    PLANNERS = (BatchPlanner(8), BatchPlanner(8, too_long="truncate"))

    @staticmethod
    def load(dataset, planner, collate=None):
        sampler = LengthBatchSampler([3] * 3, planner)
        dataset = PieceDataset(dataset) if planner.cuts_items else dataset
        return ResumableLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate or PaddedCollator()))

    @pytest.mark.parametrize("planner", PLANNERS)
    @pytest.mark.parametrize("size", [2, 4])
    def test_another_number_of_items(self, size, planner):
        with pytest.raises(ValueError, match=self.MESSAGE.format(size)):
            self.load(Sized(size), planner)

    @pytest.mark.parametrize("planner", PLANNERS)
    @pytest.mark.parametrize(
        "dataset", [Sized(3), Subset(Sized(5), [0, 3, 4]), Unsized(), NotCountedYet(), [[1] * 3] * 3]
    )
    def test_as_many_items_or_an_unknown_number(self, dataset, planner):
        assert sum(len(batch["input_ids"]) for batch in self.load(dataset, planner)) == 3

    def test_the_dataset_of_prepare(self):
        planner = BatchPlanner(8)
        load = TestNumberOfLengths.load
        with pytest.raises(ValueError, match=self.MESSAGE.format(4)):
            load(ItemDataset(), planner, Prepare(PaddedCollator(), dataset=Sized(4)))
        assert len(list(load(ItemDataset(), planner, Prepare(PaddedCollator(), dataset=Sized(3))))) == 2
        pytest.importorskip("torchdata.nodes")
        from seqwarm_kernels.data.torchdata_nodes import batch_loader

        sampler = LengthBatchSampler([3] * 3, planner)
        with pytest.raises(ValueError, match=self.MESSAGE.format(4)):
            batch_loader(sampler, Prepare(PaddedCollator(), dataset=Sized(4)))
        assert len(list(batch_loader(sampler, Prepare(PaddedCollator(), dataset=Sized(3))))) == 2
