"""What warmup_allocator passes to the model: the example batch at each length, or one that it guesses."""

import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler, warmup_allocator
from seqwarm_kernels.allocator.example_batch import Layout, TrainingBatches
from seqwarm_kernels.data import PackedCollator

from .models import Recorder

CPU = torch.device("cpu")


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
    model, batches = Recorder(by_name), []

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


def test_nested_entries_that_are_not_tensors_are_passed_unchanged():
    seen, value = [], [1, None, "words"]

    def forward(self, ids, task):
        seen.append((ids.shape, task))
        return self.weight * ids.float()

    task = {"value": value, "list": [value, 2], "inner": {"value": value, "mask": torch.ones(1, 3)}}
    warmup_allocator(Recorder(forward), 8, batch_size=2, example_batch={"ids": torch.ones(1, 3), "task": task})
    (shape, found), *_ = seen
    assert shape == found["inner"]["mask"].shape == (2, 8)
    assert (found["value"], found["list"], found["inner"]["value"]) == (value, [value, 2], value)
    assert task["inner"]["mask"].shape == (1, 3)


WEIGHTS = {"class_weights": torch.ones(10), "scale": torch.tensor(1.0)}

#: An example, the options of resizing, and the shapes of the tokens at lengths 6, 2 and 4.
SHAPES = {
    "a tensor": (torch.ones(2, 3), {}, [(2, 6), (2, 2), (2, 4)]),
    "a tuple": ((torch.ones(2, 3),), {}, [(2, 6), (2, 2), (2, 4)]),
    "rows by the tokens": (WEIGHTS | {"inputs": torch.ones(2, 4)}, {}, [(2, 6), (2, 2), (2, 4)]),
    "tokens first": (WEIGHTS | {"inputs": torch.ones(4, 2)}, {"seq_dim": 0}, [(6, 2), (2, 2), (4, 2)]),
    "more than the batch": (torch.ones(2, 3), {"return_info": True}, [(2, 6), (2, 2), (2, 4)]),
    "reshaped": (
        {"inputs": torch.ones(2, 6), "pixel_values": torch.ones(2, 3, 4, 4)},
        {"mode": "reshape", "keys": ["inputs"]},
        [(2, 6), (6, 2), (2, 4)],
    ),
}


@pytest.mark.parametrize("case", SHAPES)
def test_rows_and_lengths(case):
    example_batch, options, shapes = SHAPES[case]
    model, scheduler = Recorder(positional), SequenceLengthScheduler(2, 6, duration=10, step_size=2)
    report = warmup_allocator(model, 6, example_batch=example_batch, scheduler=scheduler, resize_options=options)
    assert [tuple(call.shape) for call in model.calls] == [*shapes, shapes[0], shapes[0]]
    assert report.batch_size == 2


@pytest.mark.parametrize("example", [None, torch.ones(0, 4), torch.ones(2, 1)])
def test_inputs_that_cannot_be_guessed_or_repeated(example):
    model = Recorder(positional)
    with pytest.raises(ValueError, match="example_batch"):
        warmup_allocator(model, 8, example_batch=example)
    assert not model.calls


BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def packed_example(*left_out):
    batch = PackedCollator()([[1, 2, 3, 4, 5], [6, 7, 8]])
    return {name: value for name, value in batch.items() if name not in left_out}


@pytest.mark.parametrize("left_out", ["nothing", "position_ids"])
def test_a_packed_example_has_the_size_of_the_batches(left_out):
    """Its boundaries cannot be repeated, but are cut."""
    model, example = Recorder(by_name), packed_example(left_out)
    for arguments in ({"max_len": 64}, {"max_len": 4}, {"max_len": 8, "batch_size": 2}):
        with pytest.raises(ValueError, match="batch"):
            warmup_allocator(model, **arguments, example_batch=example)
    assert not model.calls
    report = warmup_allocator(model, 8, batch_size=1, example_batch=example)
    assert (report.batch_size, model.calls[0][0].tolist()) == (1, [[1, 2, 3, 4, 5, 6, 7, 8]])
    batches = TrainingBatches(nn.Identity(), example, 8, CPU, None)
    bounds = [batches.make(1, length)["cu_seq_lens_q"].tolist() for length in (8, 4)]
    assert bounds == [[0, 5, 8], [0, 4, 7]]


def test_a_packed_example_of_position_ids_alone_is_repeated():
    model, example = Recorder(by_keywords), packed_example(*BOUNDARIES)
    warmup_allocator(model, 16, example_batch=example)
    assert model.calls[0]["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2] * 2]
    with pytest.raises(ValueError, match="batch_size"):
        warmup_allocator(model, 16, batch_size=2, example_batch=example)


@pytest.mark.parametrize("rows", [1, 2])
def test_position_ids_of_whole_rows_count_to_every_length(rows):
    model, scheduler = Recorder(by_keywords), SequenceLengthScheduler(4, 16, duration=10, step_size=4)
    example = {"input_ids": torch.ones(rows, 8), "position_ids": torch.arange(8).expand(rows, -1)}
    report = warmup_allocator(model, 16, batch_size=3, example_batch=example, scheduler=scheduler)
    assert report.lengths == (16, 4, 8, 12)
    assert [call["input_ids"].shape for call in model.calls] == [(3, length) for length in (16, 4, 8, 12, 16, 16)]
    assert all(call["position_ids"].tolist() == [list(range(call["input_ids"].shape[1]))] * 3 for call in model.calls)
    assert example["position_ids"].shape == (rows, 8)


@pytest.mark.parametrize(
    ("positions", "options", "shape"),
    [
        (torch.arange(3, 11).view(2, 4), {}, (3, 6)),
        (torch.tensor([[0, 1, 1, 1], [0, 1, 2, 3]]), {}, (3, 6)),
        (torch.arange(8).view(4, 2), {"seq_dim": 0}, (6, 3)),
        (torch.arange(4), {}, (6,)),
        (torch.arange(4)[None], {}, (1, 6)),
        (torch.arange(4).expand(3, 2, 4), {}, (3, 3, 6)),
    ],
)
@pytest.mark.parametrize("prefix", ["", "decoder_"])
def test_position_ids_of_one_sequence_in_each_row_count_anew(positions, options, shape, prefix):
    """Repeated, they would restart in the row, as those of several sequences do."""
    tokens_first = bool(options)
    example = {"input_ids": torch.ones((4, 2) if tokens_first else (2, 4)), f"{prefix}position_ids": positions.int()}
    found = Layout({"inner": example}, options).repeated_to(3, 6, CPU)["inner"]
    counted = torch.arange(6, dtype=torch.int32)
    counted = (counted[:, None] if tokens_first else counted).expand(shape)
    torch.testing.assert_close(found[f"{prefix}position_ids"], counted, rtol=0, atol=0)


def test_masks_are_ones_and_other_masks_are_repeated():
    example = {
        "input_ids": torch.ones(1, 2),
        "pairs": torch.zeros(1, 2, 2),
        "loss_mask": torch.tensor([[0.5, 0.0]]),
        "image_mask": torch.zeros(1, 5, dtype=torch.int64),
        "positions": torch.ones(3),
    }
    options = {"mask_keys": ["pairs"], "keys": ["input_ids", "pairs", "loss_mask"]}
    found = TrainingBatches(nn.Identity(), example, 3, CPU, options).make(2, 3)
    assert found["pairs"].shape == (2, 3, 3)
    assert found["loss_mask"].tolist() == [[0.5, 0.0, 0.5]] * 2
    assert found["image_mask"].tolist() == [[0] * 5] * 2
    assert found["positions"].shape == (3,)


def test_a_rank_trains_on_its_part():
    shards = TrainingBatches(nn.Identity(), torch.ones(2, 4), 8, CPU, None, lambda batch: {"0": batch["0"][:1]})
    assert shards.make(2, 6).shape == (1, 6)
