"""The functions that work without Composer; values are worked out by hand from Composer's documentation."""

import pytest
import torch

from seqwarm_kernels import models
from seqwarm_kernels.trainers import composer
from seqwarm_kernels.trainers.composer import set_batch_sequence_length


def ids(*rows):
    return torch.tensor(rows)


DOCUMENTED = {"input_ids": ids([10, 11, 12, 13, 14, 15]), "attention_mask": ids([1, 1, 1, 1, 1, 1])}
TWO_ROWS = {"input_ids": torch.arange(14).view(2, 7), "labels": torch.arange(1, 15).view(2, 7)}
LEFT_PADDED = {
    "input_ids": ids([0, 0, 1, 2, 3, 9], [0, 0, 0, 0, 1, 9]),
    "attention_mask": ids([0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]),
}
PACKED = {"input_ids": ids([1, 2, 3, 4, 5, 6, 7, 8]), "position_ids": ids([0, 1, 2, 3, 4, 0, 1, 2])}


@pytest.mark.parametrize(
    ("batch", "length", "truncate", "preserve", "expected"),
    [
        (DOCUMENTED, 3, True, False, {"input_ids": [[10, 11, 12]]}),
        (DOCUMENTED, 3, True, True, {"input_ids": [[10, 11, 15]]}),
        (LEFT_PADDED, 3, True, False, {"input_ids": [[1, 2, 3], [0, 1, 9]]}),  # from the first token on
        (LEFT_PADDED, 3, True, True, {"input_ids": [[1, 2, 9], [0, 1, 9]], "attention_mask": [[1, 1, 1], [0, 1, 1]]}),
        (TWO_ROWS, 4, False, True, {"labels": [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]}),  # one stream
        (PACKED, 2, True, False, {"input_ids": [[1, 2, 6, 7]], "position_ids": [[0, 1, 0, 1]]}),
        (PACKED, 2, False, False, {"input_ids": [[*range(1, 9)]], "position_ids": [[0, 1, 0, 1, 0, 0, 1, 0]]}),
    ],
)
def test_values_worked_out_by_hand(batch, length, truncate, preserve, expected):
    given = {name: tensor.clone() for name, tensor in batch.items()}
    found = set_batch_sequence_length(given, length, truncate, preserve)
    assert {name: found[name].tolist() for name in expected} == expected
    assert all(given[name].equal(tensor) for name, tensor in batch.items())


@pytest.mark.parametrize("length", [6, 7, 1000])
@pytest.mark.parametrize("preserve", [False, True])
def test_batches_that_are_short_enough_are_not_changed(length, preserve):
    batch = {"input_ids": torch.arange(12).view(2, 6), "attention_mask": torch.ones(2, 6)}
    same = set_batch_sequence_length(batch, length, preserve_end_of_sequence=preserve)
    assert list(same) == list(batch)
    for name, tensor in batch.items():
        assert torch.equal(same[name], tensor)
        assert same[name].data_ptr() == tensor.data_ptr()


def test_apply_alibi_translates_its_arguments():
    from ..support.huggingface import tiny_gpt2

    model = tiny_gpt2(16, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    report = composer.apply_alibi(model, max_sequence_length=64, optimizers=optimizer)
    assert isinstance(report, models.SurgeryReport)
    assert report.max_seq_length == 64
    assert len(report.replaced) == 2
    assert report.dropped_from_optimizers == 1
