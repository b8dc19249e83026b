"""The state that the warmups of Hugging Face and Lightning share; test_contract.py has most of what it does."""

import warnings

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.trainers.schedule_state import ScheduleState

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


def scheduler(**options):
    return SequenceLengthScheduler(4, 16, duration=1000, step_size=4, **options)


def attached(ranks_of_batch=1, total_tokens=None, **options):
    """A state that is attached to a model, and a call of the model. A batch is 2 rows of 16 tokens, cut to 4."""
    state, model = ScheduleState(scheduler(**options), total_tokens=total_tokens), Model()
    state._attach(model, model, CPU, ranks_of_batch)
    return state, lambda: model(torch.ones(2, 16, dtype=torch.long))


@pytest.mark.parametrize(("has_batch", "ranks_of_batch"), [(True, 1), (False, 1), (True, 2)])
def test_ranks_exchange_their_counts_once_in_a_step_also_one_without_a_batch(monkeypatch, has_batch, ranks_of_batch):
    """Ranks that have the same batch count it once."""
    exchanged = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: exchanged.append(total.add_(12).tolist()))
    state, train = attached(ranks_of_batch, total_tokens=30, unit="token")
    assert (state.count_tokens(), exchanged) == (0, [])
    for step in (1, 2):
        state._begin()
        if has_batch:
            train()
        tokens = step * (8 * has_batch + 12) // ranks_of_batch
        assert [state.count_tokens(), state.count_tokens()] == [tokens] * 2
        assert state._is_finished() == (tokens >= 30)
        state._step(1)
        assert len(exchanged) == step
        assert state.scheduler.progress == tokens
        assert state.count_tokens() == tokens  # between steps one rank may ask alone
        assert len(exchanged) == step
    for later in (1, 2):
        state._begin()
        assert state.count_tokens() == tokens + 12 // ranks_of_batch * later
    assert state.scheduler.progress == tokens


def test_a_count_needs_a_training_and_a_resume_needs_a_state():
    state, _ = attached()
    assert state._is_finished() is False
    state.detach()
    with pytest.raises(ValueError, match="count_tokens"):
        state.count_tokens()
    assert state.figures()["seq_length"] == 4
    with pytest.raises(ValueError, match="SequenceLengthWarmup"):
        state._resume(None)


def test_a_training_that_had_the_full_length_does_not_warn():
    falling = SequenceLengthScheduler(4, 16, duration=8, step_size=4, pacing=lambda share: float(share < 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ScheduleState(falling)._warn_of_short_training(6)  # the length falls again
        attached()[0]._warn_of_short_training(1000)
    with pytest.warns(UserWarning, match="the training ends") as caught:
        attached()[0]._warn_of_short_training(999)
    assert caught[0].filename == __file__


def test_a_training_starts_over_from_the_progress_before_the_first_one():
    state, _ = attached()
    state.scheduler.progress = 5
    for _ in range(2):
        state._start()
        assert (state.train_tokens, state.scheduler.progress) == (0, 5)
        state._step(3)
    assert state.scheduler.progress == 8


def test_what_was_seen_before_a_training_is_not_of_its_first_step():
    state, train = attached(unit="token")
    state._begin()
    train()
    assert state.count_tokens() == 8
    model = Model()
    state._attach(model, model, CPU)
    state._start()
    state._begin()
    model(torch.ones(1, 16, dtype=torch.long))
    state._step(1, count=False)  # a schedule by tokens counts all the same
    assert (state.train_tokens, state.scheduler.progress) == (4, 4)
