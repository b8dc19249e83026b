"""The run at full length before the first batch. These tests call it on a CPU, where the algorithm skips it."""

import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer.core import Precision

from seqwarm_kernels.trainers.composer.algorithms import claim_memory

from .training import counting_rows, tiny_gpt2


def state_with(model, *, microbatch=None, automatic=False, precision=Precision.FP32):
    return SimpleNamespace(
        model=model, device_train_microbatch_size=microbatch, auto_microbatching=automatic, precision=precision
    )


def rows_seen(model):
    """Returns a list that collects the shape of each input of the model."""
    seen = []
    model.model.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    return seen


def a_batch(rows=8, length=32):
    ids = counting_rows(rows, length)
    return {"input_ids": ids, "labels": ids}


class FullMemory:
    """Raises an out-of-memory error, as a device does, if a model is called with more than `most_rows` rows."""

    def __init__(self, model, most_rows):
        self.most_rows = most_rows
        model.model.register_forward_pre_hook(self.check, with_kwargs=True)

    def check(self, module, args, inputs):
        if len(inputs["input_ids"]) > self.most_rows:
            raise torch.OutOfMemoryError("all taken")


@pytest.mark.parametrize(("microbatch", "rows"), [(None, 8), (2, 2), (2.5, 3), (100, 8)])
def test_one_run_of_a_microbatch_at_full_length(microbatch, rows):
    model = tiny_gpt2()
    seen = rows_seen(model)
    claim_memory(state_with(model, microbatch=microbatch), a_batch())
    assert seen == [(rows, 32)]


def test_automatic_microbatches_shrink_until_they_fit():
    model = tiny_gpt2()
    FullMemory(model, most_rows=3)
    state = state_with(model, microbatch=8, automatic=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        claim_memory(state, a_batch())
    assert [str(warning.message) for warning in caught if warning.category is UserWarning] == [
        "SeqLengthWarmup: 8 rows of 32 tokens do not fit (all taken); device_train_microbatch_size is 4 now",
        "SeqLengthWarmup: 4 rows of 32 tokens do not fit (all taken); device_train_microbatch_size is 2 now",
    ]
    assert state.device_train_microbatch_size == 2


@pytest.mark.parametrize(("automatic", "most_rows"), [(False, 3), (True, 0)])
def test_microbatches_that_cannot_shrink_raise(automatic, most_rows):
    model = tiny_gpt2()
    FullMemory(model, most_rows)
    state = state_with(model, microbatch=8 if most_rows else 1, automatic=automatic)
    with pytest.raises(torch.OutOfMemoryError, match="device_train_microbatch_size"):
        claim_memory(state, a_batch())


def test_batches_that_are_not_mappings_are_skipped():
    model = tiny_gpt2()
    seen = rows_seen(model)
    claim_memory(state_with(model), (torch.ones(2, 3), torch.ones(2)))
    assert seen == []
