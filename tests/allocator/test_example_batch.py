"""What warmup_allocator passes to the model: the example batch at each length, or one that it guesses."""

from collections import UserList

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator.example_batch import Layout, TrainingBatches
from seqwarm_kernels.data import PackedCollator

from .models import Recorder
from .traces import assert_same, everything


def by_name(self, input_ids, attention_mask=None):
    self.calls.append((input_ids, attention_mask))
    return input_ids * self.weight


def by_keywords(self, **batch):
    self.calls.append(batch)
    return batch["input_ids"] * self.weight


def whole(self, batch):
    self.calls.append(batch)
    return {"loss": (batch["input_ids"] * self.weight).mean()}


def positional(self, inputs):
    self.calls.append(inputs)
    return inputs * self.weight


def example():
    return {
        "input_ids": torch.tensor([[1, 2, 3]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "labels": torch.tensor([[4, 5, -100]]),
        "weight": torch.tensor([0.5]),
        "pair_mask": torch.zeros(1, 1, 3, 3, dtype=torch.bool),
    }


def test_a_mapping_is_passed_by_the_names_of_forward():
    model = Recorder(by_name)
    batches = []

    def loss_fn(output, batch):
        batches.append(batch)
        return output.mean()

    report = warmup_allocator(model, 7, batch_size=2, example_batch=example(), loss_fn=loss_fn)
    ((input_ids, attention_mask),) = model.calls
    assert input_ids.tolist() == [[1, 2, 3, 1, 2, 3, 1]] * 2
    assert attention_mask.tolist() == [[1] * 7] * 2
    assert batches[0]["labels"].tolist() == [[4, 5, -100, 4, 5, -100, 4]] * 2
    assert batches[0]["weight"].tolist() == [0.5, 0.5]
    assert batches[0]["pair_mask"].shape == (2, 1, 7, 7)
    assert batches[0]["pair_mask"].all()
    assert report.batch_size == 2


@pytest.mark.parametrize("forward", [by_keywords, whole])
def test_a_mapping_is_passed_whole(forward):
    model = Recorder(forward)
    warmup_allocator(model, 5, example_batch=example())
    assert list(model.calls[0]) == list(example())
    assert model.calls[0]["input_ids"].shape == (1, 5)


class Named(nn.Embedding):
    """An embedding whose forward has parameters of other names."""

    def forward(self, idx, targets=None):
        return super().forward(idx)


@pytest.mark.parametrize(
    ("model", "name"), [(Named(8, 4), "idx"), (nn.Sequential(nn.Embedding(8, 4)), "dict")], ids=["two", "one"]
)
def test_names_that_do_not_fit_the_parameters(model, name):
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    with pytest.raises(TypeError, match=name):
        warmup_allocator(model, 8, example_batch=batch)


@pytest.mark.parametrize("make", [lambda t: t, lambda t: (t, t), lambda t: [t, t]])
def test_tensors_are_passed_by_position(make):
    model = Recorder(positional)
    scheduler = SequenceLengthScheduler(2, 6, duration=10, step_size=2)
    warmup_allocator(model, 6, example_batch=make(torch.arange(6).view(2, 3)), scheduler=scheduler)
    assert [tuple(call.shape) for call in model.calls] == [(2, 6), (2, 2), (2, 4), (2, 6)]


@pytest.mark.parametrize("value", [3, 1.5, None, "words", [1, None]], ids=repr)
def test_nested_entries_that_are_not_tensors_are_passed_unchanged(value):
    seen = []

    def forward(self, ids, task):
        seen.append((ids.shape, task))
        return self.weight * ids.float()

    task = {"value": value, "list": [value, 2], "inner": {"value": value, "mask": torch.ones(1, 3)}}
    warmup_allocator(Recorder(forward), 8, batch_size=2, example_batch={"ids": torch.ones(1, 3), "task": task})
    (shape, found), *_ = seen
    assert shape == found["inner"]["mask"].shape == (2, 8)
    assert (found["value"], found["list"], found["inner"]["value"]) == (value, [value, 2], value)
    assert task["inner"]["mask"].shape == (1, 3)


def test_resize_options_are_applied():
    model = Recorder(by_name)
    scheduler = SequenceLengthScheduler(4, 8, duration=10, step_size=4)
    batch = {"input_ids": torch.ones(2, 8), "pixel_values": torch.ones(2, 3, 4, 4)}
    options = {"mode": "reshape", "keys": ["input_ids"]}
    warmup_allocator(model, 8, example_batch=batch, scheduler=scheduler, resize_options=options)
    assert [tuple(input_ids.shape) for input_ids, _ in model.calls] == [(2, 8), (4, 4), (2, 8)]


def test_tokens_may_come_first():
    model = Recorder(by_name)
    scheduler = SequenceLengthScheduler(8, 64, duration=10, step_size=56)
    options = {"seq_dim": 0}
    batch = {"class_weights": torch.ones(10), "scale": torch.tensor(1.0), "input_ids": torch.zeros(16, 4)}
    report = warmup_allocator(model, 64, batch_size=2, example_batch=batch, scheduler=scheduler, resize_options=options)
    assert [tuple(input_ids.shape) for input_ids, _ in model.calls] == [(64, 2), (8, 2), (64, 2)]
    assert report.batch_size == 2


def test_rows_are_counted_by_the_tokens():
    batch = {"class_weights": torch.ones(10), "scale": torch.tensor(1.0), "input_ids": torch.zeros(2, 4)}
    assert warmup_allocator(Recorder(by_name), 8, example_batch=batch).batch_size == 2


class Config:
    vocab_size = 30


class HuggingFaceLike(nn.Module):
    """Has everything that is read from a transformers model: config, names of forward, output embeddings, loss."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.project = nn.Linear(1, 30)
        self.seen = UserList()

    def get_output_embeddings(self):
        return self.project

    def forward(self, input_ids=None, attention_mask=None, labels=None):
        self.seen.append((input_ids, attention_mask, labels))
        logits = self.project(input_ids[..., None].float())
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def test_a_hugging_face_model_without_an_example():
    model = HuggingFaceLike()
    warmup_allocator(model, 12, batch_size=3)
    ((input_ids, attention_mask, labels),) = model.seen
    assert input_ids.shape == (3, 12)
    assert input_ids.min() >= 0
    assert input_ids.max() < 30
    assert attention_mask.all()
    assert labels.equal(input_ids)
    assert warmup_allocator(model, 12).batch_size == 1


@pytest.mark.parametrize(
    "make", [lambda: nn.Linear(4, 4), lambda: nn.Sequential(nn.Conv1d(2, 2, 1), nn.Embedding(3, 3))]
)
def test_inputs_that_cannot_be_guessed(make):
    model = make()
    before = everything(model)
    with pytest.raises(ValueError, match=r"cannot guess the inputs of .*; pass example_batch"):
        warmup_allocator(model, 8)
    assert_same(before, everything(model))


def test_the_sequences_of_a_packed_example_are_cut():
    example = PackedCollator()([[1, 2, 3, 4, 5], [6, 7, 8]])

    def bounds(max_len, length):
        batches = TrainingBatches(nn.Identity(), example, max_len, torch.device("cpu"), None)
        return batches.make(1, length)["cu_seq_lens_q"].tolist()

    assert bounds(8, 8) == [0, 5, 8]
    assert bounds(8, 4) == [0, 4, 7]


def packed_example(*names):
    batch = PackedCollator()([[1, 2, 3, 4, 5], [6, 7, 8]])
    return {name: value for name, value in batch.items() if name not in names}


@pytest.mark.parametrize("left_out", ["nothing", "position_ids"])
def test_a_packed_example_has_the_size_of_the_batches(left_out):
    """Its boundaries cannot be repeated."""
    model, example = Recorder(by_name), packed_example(left_out)
    for arguments in ({"max_len": 64}, {"max_len": 4}, {"max_len": 8, "batch_size": 2}):
        with pytest.raises(ValueError, match="batch"):
            warmup_allocator(model, **arguments, example_batch=example)
    assert not model.calls
    report = warmup_allocator(model, 8, batch_size=1, example_batch=example)
    assert (report.batch_size, model.calls[0][0].tolist()) == (1, [[1, 2, 3, 4, 5, 6, 7, 8]])


def test_a_packed_example_of_position_ids_alone_is_repeated():
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    model, example = Recorder(by_keywords), packed_example(*names)
    warmup_allocator(model, 16, example_batch=example)
    assert model.calls[0]["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2] * 2]
    with pytest.raises(ValueError, match="batch_size must be 1, the one row of a packed example_batch, got 2"):
        warmup_allocator(model, 16, batch_size=2, example_batch=example)


def test_position_ids_of_one_row_are_one_sequence():
    model = Recorder(by_keywords)
    example = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(8)[None]}
    warmup_allocator(model, 12, example_batch=example)
    assert [call["position_ids"].tolist() for call in model.calls] == [[list(range(12))]]
    assert example["position_ids"].tolist() == [list(range(8))]


def test_position_ids_of_whole_rows_are_not_packed():
    model = Recorder(by_keywords)
    example = {"input_ids": torch.ones(2, 3), "position_ids": torch.arange(3).expand(2, -1)}
    warmup_allocator(model, 6, batch_size=4, example_batch=example)
    assert model.calls[0]["position_ids"].tolist() == [list(range(6))] * 4


def test_every_length_is_rehearsed_with_position_ids():
    model, scheduler = Recorder(by_keywords), SequenceLengthScheduler(4, 16, duration=10, step_size=4)
    example = {"input_ids": torch.arange(8)[None], "position_ids": torch.arange(8)[None]}
    report = warmup_allocator(model, 16, example_batch=example, scheduler=scheduler)
    assert sorted(report.lengths) == [4, 8, 12, 16]
    assert [call["input_ids"].shape[1] for call in model.calls] == [16, 4, 8, 12, 16]
    assert all(call["position_ids"].tolist() == [list(range(call["input_ids"].shape[1]))] for call in model.calls)


def repeated_to(example, rows, length, options):
    return Layout(example, options).repeated_to(rows, length, torch.device("cpu"))


@pytest.mark.parametrize("positions", [[[3, 4, 5, 6], [7, 8, 9, 10]], [[0, 1, 1, 1], [0, 1, 2, 3]]])
@pytest.mark.parametrize("prefix", ["", "decoder_"])
@pytest.mark.parametrize("seq_dim", [0, 1])
def test_position_ids_of_a_sequence_in_each_row_count_anew(positions, prefix, seq_dim):
    """Repeated, they would restart in the row, as those of several sequences do."""
    inner = {f"{prefix}position_ids": torch.tensor(positions, dtype=torch.int32)}
    inner[f"{prefix}attention_mask"] = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    if seq_dim == 0:
        inner = {name: value.T for name, value in inner.items()}
    result = repeated_to({"inner": inner}, 3, 6, {"seq_dim": seq_dim})["inner"]
    found, mask = result[f"{prefix}position_ids"], result[f"{prefix}attention_mask"]
    assert found.dtype == torch.int32
    assert (found if seq_dim == 1 else found.T).tolist() == [list(range(6))] * 3
    assert mask.all()


@pytest.mark.parametrize("example", [torch.ones(0, 4), torch.ones(2, 1)])
def test_an_example_without_tokens_to_repeat(example):
    model = Recorder(positional)
    with pytest.raises(ValueError, match="example_batch must have a row of at least two tokens"):
        warmup_allocator(model, 8, example_batch=example)
    assert not model.calls


def test_masks_are_ones_and_other_masks_are_repeated():
    example = {
        "input_ids": torch.ones(1, 2),
        "pairs": torch.zeros(1, 2, 2),
        "loss_mask": torch.tensor([[0.5, 0.0]]),
        "image_mask": torch.zeros(1, 5, dtype=torch.int64),
        "positions": torch.ones(3),
    }
    options = {"mask_keys": ["pairs"], "keys": ["input_ids", "pairs", "loss_mask"]}
    found = TrainingBatches(nn.Identity(), example, 3, torch.device("cpu"), options).make(2, 3)
    assert found["pairs"].shape == (2, 3, 3)
    assert found["loss_mask"].tolist() == [[0.5, 0.0, 0.5]] * 2
    assert found["image_mask"].tolist() == [[0] * 5] * 2
    assert found["positions"].shape == (3,)


def test_a_rank_trains_on_its_part():
    shards = TrainingBatches(
        nn.Identity(), torch.ones(2, 4), 8, torch.device("cpu"), None, lambda batch: {"0": batch["0"][:1]}
    )
    assert shards.make(2, 6).shape == (1, 6)


def test_options_that_return_more_than_the_batch():
    model = Recorder(positional)
    warmup_allocator(model, 8, example_batch=torch.ones(1, 4), resize_options={"return_info": True})
    assert model.calls[0].shape == (1, 8)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (3, 2, 6)])
def test_position_ids_of_other_shapes_get_the_longest_length(shape):
    batch = {"input_ids": torch.zeros(2, 6, dtype=torch.int64), "position_ids": torch.arange(6).expand(shape)}
    repeated = repeated_to(batch, 4, 9, {})
    rows = (*shape[:-2], 4) if len(shape) == 3 else shape[:-1]
    assert repeated["position_ids"].equal(torch.arange(9).expand(*rows, 9))
    assert repeated["input_ids"].shape == (4, 9)
