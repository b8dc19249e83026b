"""The run at full length before the first batch. These tests call it on a CPU, where the algorithm skips it."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from composer.core import Precision

from seqwarm_kernels.trainers.composer.algorithms import claim_memory

from .training import counting_rows, tiny_gpt2


def claimed(microbatch=None, *, automatic=False, most_rows=8, batch=None):
    """The state, and the rows of each run. More than `most_rows` rows are out of memory, as on a device."""
    model, seen = tiny_gpt2(), []
    state = SimpleNamespace(
        model=model,
        device_train_microbatch_size=microbatch,
        auto_microbatching=automatic,
        precision=Precision.FP32,
    )

    def see(module, args, inputs):
        rows, length = inputs["input_ids"].shape
        assert length == 32
        seen.append(rows)
        if rows > most_rows:
            raise torch.OutOfMemoryError("all taken")

    model.model.register_forward_pre_hook(see, with_kwargs=True)
    ids = counting_rows(8, 32)
    claim_memory(state, {"input_ids": ids, "labels": ids} if batch is None else batch)
    return state, seen


@pytest.mark.parametrize(("microbatch", "rows"), [(None, 8), (2, 2), (2.5, 3), (100, 8)])
@pytest.mark.filterwarnings("error:SeqLengthWarmup")
def test_one_run_of_a_microbatch_at_full_length(microbatch, rows):
    assert claimed(microbatch)[1] == [rows]


def test_automatic_microbatches_shrink_until_they_fit():
    with pytest.warns(match="SeqLengthWarmup") as caught:
        state, seen = claimed(8, automatic=True, most_rows=3)
    assert seen == [8, 4, 2]
    assert state.device_train_microbatch_size == 2
    messages = [message for warning in caught if "SeqLengthWarmup" in (message := str(warning.message))]
    assert [message.rpartition("device_train_microbatch_size is ")[2] for message in messages] == ["4 now", "2 now"]


@pytest.mark.parametrize(("microbatch", "automatic", "most_rows"), [(8, False, 3), (1, True, 0)])
def test_microbatches_that_cannot_shrink_raise(microbatch, automatic, most_rows):
    with pytest.raises(torch.OutOfMemoryError, match="device_train_microbatch_size"):
        claimed(microbatch, automatic=automatic, most_rows=most_rows)


def test_batches_that_are_not_mappings_are_skipped():
    assert claimed(batch=(torch.ones(2, 3), torch.ones(2)))[1] == []
