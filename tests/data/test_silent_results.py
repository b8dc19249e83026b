"""Misuse of batches by length that once gave wrong batches without a word."""

import pickle
from itertools import islice

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
    Piece,
    PieceDataset,
    Prepare,
    ResumableLoader,
    cut_item,
)

from .made import ListSource, first_batches


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
class TestMasksOfItems:
    """Collators left masks out of the batch, so that padding and prompts were trained on."""

    def test_a_tokenizer_that_padded(self, make, collator):
        whole = {"input_ids": [5, 6, 7], "attention_mask": make([1, 1, 1])}
        padded = {"input_ids": [8, 0, 0], "attention_mask": make([1, 0, 0])}
        with pytest.raises(ValueError, match=r"attention_mask of an item must be 1 .* tokenize without padding"):
            collator([whole, padded])
        assert collator([whole])["input_ids"].tolist() == [[5, 6, 7]]

    @pytest.mark.parametrize("name", ["completion_mask", "assistant_masks", "loss_mask"])
    def test_prompts(self, name, make, collator):
        item = {"input_ids": [5, 6, 7], name: make([0, 0, 1])}
        with pytest.raises(ValueError, match=rf"must be -100 where its {name} is 0, got 5 at token 0: write -100 into"):
            collator([item])
        with pytest.raises(ValueError, match="got 6 at token 1"):
            collator([{**item, "labels": [-100, 6, 7]}])
        assert collator([{**item, "labels": [-100, -100, 7]}])["labels"].tolist() == [[-100, -100, 7]]
        with pytest.raises(ValueError, match=rf"{name} must be as long as the 3 tokens of its item, got 2$"):
            collator([{**item, name: make([0, 1])}])


@pytest.mark.parametrize("collator", [PaddedCollator(), PackedCollator()])
@pytest.mark.parametrize("name", ["attention_mask", "completion_mask", "assistant_masks", "loss_mask"])
@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(3, 3).tril().bool(),
        torch.ones(3, 3).tril().long().numpy(),
        [torch.tensor([1, 0, 0]), torch.tensor([1, 1, 0])],
        [[1, 0, 0], [1, 1]],
        torch.tensor([0.0, 0.0, -1e9]),
        torch.tensor([0.0, 0.5, 1.0], dtype=torch.bfloat16),
        np.array([0.0, 0.0, -np.inf]),
        [0.0, 0.0, -1e9],
    ],
    ids=["causal", "causal ints", "tensors", "rows", "additive", "weights", "array", "floats"],
)
def test_masks_of_pairs_and_of_floating_point_are_left_out(mask, name, collator):
    """They are not 0 where a token is hidden or not trained on."""
    item = {"input_ids": [5, 6, 7]}
    batch, expected = collator([{**item, name: mask}]), collator([item])
    for entry in ("input_ids", "labels"):
        assert torch.equal(batch[entry], expected[entry])


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
        with pytest.raises(ValueError, match="item 1 must have the 7 tokens that its length says, got 8, whose end"):
            list(batches_of(items, [5, 7, 6], planner, as_mapping))

    def test_the_last_piece_of_an_item(self):
        planner = BatchPlanner(batch_size=1, max_length=4, too_long="split")
        with pytest.raises(ValueError, match="item 0 must have the 10 tokens that its length says, got 11"):
            list(batches_of([[1] * 11], [10], planner))

    @pytest.mark.parametrize("counted", [4, 5, 6])
    def test_an_item_that_is_truncated_may_be_longer(self, counted):
        planner = BatchPlanner(batch_size=1, max_length=4, too_long="truncate")
        assert next(iter(batches_of([[1] * 6], [counted], planner)))["input_ids"].shape == (1, 4)

    def test_without_a_maximum_length(self):
        with pytest.raises(ValueError, match="item 0 must have the 3 tokens"):
            list(batches_of([[1] * 4], [3], BatchPlanner(batch_size=1, too_long="truncate")))

    @pytest.mark.parametrize(("warmup", "raises"), [("bucket", True), ("cut", False)])
    def test_under_warmup(self, warmup, raises):
        """Only "cut" takes no more than the current length, 4 here, of an item."""
        scheduler = SequenceLengthScheduler(4, 8, duration=100, step_size=1)
        batches = batches_of([[1] * 6], [4], BatchPlanner(8, max_length=scheduler, warmup=warmup, too_long="truncate"))
        if not raises:
            assert next(iter(batches))["input_ids"].shape == (1, 4)
            return
        with pytest.raises(ValueError, match="item 0 must have the 4 tokens that its length says, got 6"):
            next(iter(batches))

    def test_a_transform_that_adds_a_token(self):
        def loader(transform):
            planner = BatchPlanner(8, too_long="truncate")
            stream = LengthBatchStream(ListSource(["abc", "de"]), planner, length=len, shuffle=False)
            prepare = Prepare(PaddedCollator(), transform=transform)
            return DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=prepare)

        assert next(iter(loader(lambda text: list(text.encode()))))["input_ids"].shape == (2, 3)
        with pytest.raises(ValueError, match="item 0 of the batch must have the 3 tokens that its length says, got 4"):
            list(loader(lambda text: [*text.encode(), 0]))

    def test_a_cut_of_your_own_is_not_checked(self):
        sampler = LengthBatchSampler([3], BatchPlanner(8, too_long="truncate"))
        dataset = PieceDataset([[1] * 4], cut=lambda item, start, length: cut_item(item, start, length))
        (batch,) = DataLoader(dataset, batch_sampler=sampler, collate_fn=PaddedCollator())
        assert batch["input_ids"].shape == (1, 3)

    def test_pieces_are_what_they_were(self):
        """Three fields, equal to a Piece, and picklable."""
        (batch,) = LengthBatchSampler([6], BatchPlanner(8, too_long="truncate"))
        assert pickle.loads(pickle.dumps(batch)) == batch == [Piece(0, 0, 6)]
        item, start, length = batch[0]
        assert (item, start, length) == (0, 0, 6)


@pytest.mark.parametrize("text", ["a text", b"a text"])
@pytest.mark.parametrize("make", [lambda text: text, lambda text: {"input_ids": text}], ids=["text", "mapping"])
def test_characters_are_not_cut_for_tokens(make, text):
    planner = BatchPlanner(8, max_length=4, too_long="truncate")
    for lengths in ([6], [3]):
        (batch,) = LengthBatchSampler(lengths, planner)
        for cut in (Prepare(list, dataset=[make(text)]), PieceDataset([make(text)]).__getitems__):
            with pytest.raises(TypeError, match=r"to cut must hold tokens, got b?'a text', whose characters"):
                cut(batch)


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

    MESSAGE = r"must have as many items as the sampler has lengths, 3, got {}: items .*\.Subset\(dataset, indices\)"
    PLANNERS = (BatchPlanner(8), BatchPlanner(8, too_long="truncate"))

    @staticmethod
    def load(dataset, planner, collate=None):
        sampler = LengthBatchSampler([3] * 3, planner)
        dataset = PieceDataset(dataset) if planner.cuts_items else dataset
        return ResumableLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate or PaddedCollator()))

    @pytest.mark.parametrize("planner", PLANNERS)
    @pytest.mark.parametrize("size", [2, 4])
    def test_another_number_of_items(self, size, planner):
        with pytest.raises(ValueError, match="dataset of loader " + self.MESSAGE.format(size)):
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
        with pytest.raises(ValueError, match="dataset of collate_fn of loader " + self.MESSAGE.format(4)):
            load(ItemDataset(), planner, Prepare(PaddedCollator(), dataset=Sized(4)))
        assert len(list(load(ItemDataset(), planner, Prepare(PaddedCollator(), dataset=Sized(3))))) == 2
        pytest.importorskip("torchdata.nodes")
        from seqwarm_kernels.data.torchdata_nodes import batch_loader

        sampler = LengthBatchSampler([3] * 3, planner)
        with pytest.raises(ValueError, match="dataset of prepare " + self.MESSAGE.format(4)):
            batch_loader(sampler, Prepare(PaddedCollator(), dataset=Sized(4)))
        assert len(list(batch_loader(sampler, Prepare(PaddedCollator(), dataset=Sized(3))))) == 2


class IgnoresIndex(Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return torch.ones(9, dtype=torch.int64)


class Mapped(IgnoresIndex):
    def __getitem__(self, index):
        return {"input_ids": torch.ones(9, dtype=torch.int64)}


class Tupled(IgnoresIndex):
    def __getitem__(self, index):
        return torch.ones(9, dtype=torch.int64), 3


class KnowsPieces(IgnoresIndex):
    def __getitem__(self, index):
        return torch.ones(index.length, dtype=torch.int64)


def cut_planner(**options):
    scheduler = SequenceLengthScheduler(2, 9, duration=100, step_size=1)
    return BatchPlanner(batch_size=2, max_length=scheduler, warmup="cut", **options)


class TestPiecesAreNoIndices:
    """A Piece was a tuple, which tensors and arrays took for three indices."""

    @pytest.mark.parametrize("make", [torch.arange, np.arange])
    def test_tensors_and_arrays_in_a_dataset(self, make):
        class Dense(IgnoresIndex):
            items = make(4 * 9 * 4).reshape(4, 9, 4)

            def __getitem__(self, index):
                return self.items[index]

        sampler = LengthBatchSampler([9] * 4, BatchPlanner(16, max_length=3, too_long="split"))
        with pytest.raises(TypeError, match="a Piece is part of an item, not an index: wrap the dataset in PieceData"):
            list(DataLoader(Dense(), batch_sampler=sampler))

    def test_what_remains_of_a_tuple(self):
        piece = Piece(3, 1, 2)
        assert not isinstance(piece, tuple)
        assert piece == Piece(3, 1, 2, item_end=3)
        assert len({piece, Piece(3, 1, 2, item_end=3)}) == 1
        assert Piece(2, 5, 5) < piece < Piece(3, 2, 0)
        assert pickle.loads(pickle.dumps(Piece(3, 1, 2, 3))).item_end == 3

    @pytest.mark.parametrize(
        ("dataset", "collate"),
        [
            (IgnoresIndex(), PaddedCollator(multiple_of=4)),
            *((IgnoresIndex(), None), (Mapped(), None), (Tupled(), None)),
        ],
    )
    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_a_dataset_that_does_not_cut(self, dataset, collate, num_workers):
        loader = self.loader(dataset, collate, cut_planner(), num_workers)
        with pytest.raises(
            ValueError, match=r"dataset of loader must cut .* of at most 2 tokens .* got an item of 9: "
        ):
            next(iter(loader))
        assert loader.progress.batches == 0

    def test_a_dataset_that_does_not_cut_packed(self):
        planner = BatchPlanner(8, max_length=2, too_long="split", packed=True)
        with pytest.raises(ValueError, match="must cut items"):
            next(iter(self.loader(IgnoresIndex(), PackedCollator(), planner)))

    @pytest.mark.parametrize("dataset", [KnowsPieces(), PieceDataset(IgnoresIndex())])
    @pytest.mark.parametrize("collate", [PaddedCollator(multiple_of=4), PaddedCollator()])
    def test_a_dataset_that_cuts(self, dataset, collate):
        batch = next(iter(self.loader(dataset, collate, cut_planner())))
        assert batch["attention_mask"].sum(1).tolist() == [2, 2]

    @pytest.mark.parametrize("dataset", [IgnoresIndex(), PieceDataset(IgnoresIndex(), cut=lambda item, *_: item)])
    def test_own_padding_and_own_cuts_are_not_checked(self, dataset):
        collate = torch.stack if type(dataset) is IgnoresIndex else PaddedCollator()
        batch = next(iter(self.loader(dataset, collate, cut_planner())))
        assert (batch if isinstance(batch, torch.Tensor) else batch["input_ids"]).shape == (2, 9)

    @staticmethod
    def loader(dataset, collate, planner, num_workers=0):
        sampler = LengthBatchSampler([9] * 20, planner)
        return ResumableLoader(DataLoader(dataset, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers))


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


class TestMovesOfTheSampler:
    """`set_epoch` and `load_state_dict` of the sampler were undone if a loader was in the middle of an epoch."""

    LENGTHS = (3, 5, 4, 6) * 10

    def sampler(self, epoch=0):
        scheduler = SequenceLengthScheduler(3, 6, duration=60, step_size=1)
        sampler = LengthBatchSampler(self.LENGTHS, BatchPlanner(12, max_length=scheduler, warmup="cut"), window=20)
        sampler.set_epoch(epoch)
        return sampler

    def loader(self, num_workers=0, **options):
        sampler, items = self.sampler(), [[number] * length for number, length in enumerate(self.LENGTHS)]
        loader = DataLoader(
            PieceDataset(items), batch_sampler=sampler, collate_fn=PaddedCollator(), num_workers=num_workers
        )
        return sampler, ResumableLoader(loader, **options)

    @staticmethod
    def numbers(batches, count=None):
        return [batch["input_ids"][:, 0].tolist() for batch in islice(batches, count)]

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_set_epoch(self, num_workers):
        """The batches that were fetched and not yielded count nowhere, also in the schedule."""
        sampler, loader = self.loader(num_workers)
        same, of_loader = self.loader()
        for epoch in (0, 1, 1, 3):
            sampler.set_epoch(epoch)
            of_loader.set_epoch(epoch)
            assert loader.state_dict() == of_loader.state_dict() == sampler.state_dict() == same.state_dict()
            assert self.numbers(loader, 4) == self.numbers(of_loader, 4)
            assert loader.progress == of_loader.progress
            assert int(loader.progress.epochs) == epoch

    @pytest.mark.parametrize("num_workers", [0, 1])
    def test_load_state_dict(self, num_workers):
        everything = self.numbers(self.loader()[1])
        _, saved = self.loader()
        assert self.numbers(saved, 5) == everything[:5]
        sampler, loader = self.loader(num_workers)
        assert self.numbers(loader, 2) == everything[:2]
        sampler.load_state_dict(saved.state_dict())
        assert loader.state_dict() == saved.state_dict()
        assert loader.progress == saved.progress
        assert self.numbers(loader) == everything[5:]

    def test_a_state_that_is_loaded_during_an_iteration(self):
        sampler, loader = self.loader()
        batches = iter(loader)
        next(batches)
        sampler.load_state_dict(sampler.state_dict())
        with pytest.raises(RuntimeError, match="this iterator is invalid: the loader was iterated again or restored"):
            next(batches)

    def test_set_epoch_during_an_iteration(self):
        """The iteration goes on, and the state with it."""
        sampler, loader = self.loader(fetched_ahead=1)
        batches = iter(loader)
        next(batches)
        sampler.set_epoch(4)
        next(batches)
        assert loader.progress[2:] == (1, pytest.approx(loader.progress.items / len(self.LENGTHS)))
        assert len(self.numbers(batches)) > 2
        assert sampler.epoch == 1

    def test_a_stream(self):
        def make():
            stream = LengthBatchStream(ListSource([[number] * 3 for number in range(30)]), BatchPlanner(6), window=10)
            return stream, ResumableLoader(DataLoader(ItemDataset(), batch_sampler=stream, collate_fn=PaddedCollator()))

        everything = self.numbers(make()[1])
        _, saved = make()
        self.numbers(saved, 5)
        stream, loader = make()
        self.numbers(loader, 2)
        stream.load_state_dict(saved.state_dict())
        assert self.numbers(loader) == everything[5:]


class TestStreamOfOtherLengths:
    """A state was resumed in the middle of another plan if only the number of items was the same."""

    ITEMS = tuple([number] * (1 + number * 7 % 40) for number in range(200))

    def stream(self, length):
        return LengthBatchStream(ListSource(self.ITEMS), BatchPlanner(200), length=length, window=200)

    def test_it_is_refused(self):
        first = self.stream(len)
        first_batches(first, 8)
        state, other = first.state_dict(), self.stream(lambda item: len(item) + 1)
        other.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(ValueError, match=r"must be of the same items and lengths: .*batches=\d\) here"):
                next(iter(other))
        assert other.state_dict() == state
        other.load_state_dict(self.stream(len).state_dict())
        assert sum(map(len, other)) == 200
        again = self.stream(len)
        again.load_state_dict(state)
        assert list(again) == list(first)


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_lengths_that_change_later(make):
    """The plan changed with the array of the caller."""
    lengths = make([5, 1, 4, 2, 3] * 8)
    sampler, planned = (LengthBatchSampler(lengths, BatchPlanner(10), window=5) for _ in range(2))
    planned = list(planned)
    lengths[:] = 1
    assert list(sampler) == planned
