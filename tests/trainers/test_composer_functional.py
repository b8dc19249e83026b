"""The functions that work without Composer; values are worked out by hand from Composer's documentation."""

from dataclasses import dataclass

import pytest
import torch

from seqwarm_kernels import models
from seqwarm_kernels.trainers import composer
from seqwarm_kernels.trainers.composer import set_batch_sequence_length


def ids(*rows):
    return torch.tensor(rows)


def test_the_documented_example():
    batch = {"input_ids": ids([10, 11, 12, 13, 14, 15]), "attention_mask": ids([1, 1, 1, 1, 1, 1])}
    assert set_batch_sequence_length(batch, 3)["input_ids"].tolist() == [[10, 11, 12]]
    kept = set_batch_sequence_length(batch, 3, preserve_end_of_sequence=True)
    assert kept["input_ids"].tolist() == [[10, 11, 15]]
    assert batch["input_ids"].tolist() == [[10, 11, 12, 13, 14, 15]]


@pytest.mark.parametrize(("preserve", "first_row"), [(False, [1, 2, 3]), (True, [1, 2, 9])])
def test_rows_that_begin_with_padding_are_cut_from_their_first_token_on(preserve, first_row):
    batch = {
        "input_ids": ids([0, 0, 1, 2, 3, 9], [0, 0, 0, 0, 1, 9]),
        "attention_mask": ids([0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]),
    }
    cut = set_batch_sequence_length(batch, 3, preserve_end_of_sequence=preserve)
    assert cut["input_ids"].tolist() == [first_row, [0, 1, 9]]
    assert cut["attention_mask"].tolist() == [[1, 1, 1], [0, 1, 1]]


def test_without_truncation_the_batch_is_one_stream_without_its_tail():
    batch = {"input_ids": torch.arange(14).view(2, 7), "labels": torch.arange(100, 114).view(2, 7)}
    reshaped = set_batch_sequence_length(batch, 4, truncate=False, preserve_end_of_sequence=True)
    assert reshaped["input_ids"].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert reshaped["labels"].tolist() == [[100, 101, 102, 103], [104, 105, 106, 107], [108, 109, 110, 111]]


@pytest.mark.parametrize("length", [6, 7, 1000])
@pytest.mark.parametrize("preserve", [False, True])
def test_batches_that_are_short_enough_are_not_changed(length, preserve):
    batch = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6)}
    same = set_batch_sequence_length(batch, length, preserve_end_of_sequence=preserve)
    assert list(same) == list(batch)
    for name, tensor in batch.items():
        assert torch.equal(same[name], tensor)
        assert same[name].data_ptr() == tensor.data_ptr()


@pytest.mark.parametrize(("truncate", "kept"), [(True, [1, 2, 6, 7]), (False, list(range(1, 9)))])
def test_each_sequence_of_a_packed_batch_is_cut(truncate, kept):
    batch = {"input_ids": ids(list(range(1, 9))), "position_ids": ids([0, 1, 2, 3, 4, 0, 1, 2])}
    cut = set_batch_sequence_length(batch, 2, truncate)
    assert cut["input_ids"].tolist() == [kept]
    assert cut["position_ids"].tolist() == [[0, 1, 0, 1] if truncate else [0, 1, 0, 1, 0, 0, 1, 0]]
    with pytest.raises(ValueError, match="keep_last_token"):
        set_batch_sequence_length(batch, 2, preserve_end_of_sequence=True)


def test_apply_alibi_translates_its_arguments():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=32, n_embd=32, n_layer=2, n_head=2))
    optimizer = torch.optim.AdamW(model.parameters())
    report = composer.apply_alibi(model, max_sequence_length=64, optimizers=optimizer)
    assert isinstance(report, models.SurgeryReport)
    assert report.max_seq_length == 64
    assert len(report.replaced) == 2
    assert report.dropped_from_optimizers == 1


@dataclass
class Batch:
    input_ids: torch.Tensor
    source: str


def test_batches_that_are_not_mappings():
    batch = Batch(torch.arange(12).view(2, 6), "a book")
    cut = composer.set_batch_sequence_length(batch, 3)
    assert cut.input_ids.tolist() == [[0, 1, 2], [6, 7, 8]]
    assert cut.source == "a book"
    with pytest.raises(TypeError, match="batch"):
        composer.set_batch_sequence_length(torch.arange(12).view(2, 6), 3)
