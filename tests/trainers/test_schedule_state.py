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


@pytest.mark.parametrize("has_batch", [True, False])
def test_ranks_exchange_their_counts_once_in_a_step_also_one_without_a_batch(monkeypatch, has_batch):
    exchanged = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: exchanged.append(total.add_(5).tolist()))
    state, model = ScheduleState(scheduler(unit="token"), total_tokens=30), Model()
    state._attach(model, model, CPU)
    assert (state.count_tokens(), exchanged) == (0, [])
    for step in (1, 2):
        state._begin()
        if has_batch:
            model(torch.ones(2, 16, dtype=torch.long))
        tokens = step * (8 * has_batch + 5)
        assert [state.count_tokens(), state.count_tokens()] == [tokens] * 2
        assert state._is_finished() == (tokens >= 30)
        state._step(1)
        assert len(exchanged) == step
        assert state.scheduler.progress == tokens
        assert state.count_tokens() == tokens  # between steps one rank may ask alone
        assert len(exchanged) == step
    for later in (1, 2):
        state._begin()
        assert state.count_tokens() == tokens + 5 * later
    assert state.scheduler.progress == tokens


def state_of(**options):
    """A state that is attached to a model, and the model. A batch is 2 rows of 16 tokens, cut to 4."""
    state, model = ScheduleState(scheduler(**options)), Model()
    state._attach(model, model, CPU)
    return state, lambda: model(torch.ones(2, 16, dtype=torch.long))


def test_steps_that_wait_are_counted_later():
    state, train = state_of()
    for _ in range(3):
        state._begin()
        train()
        state._step(1, count=False)
    assert state.figures() == {"seq_length": 4}
    assert (state.train_tokens, state.scheduler.progress) == (0, 3)
    state._count_remaining()
    assert state.figures() == {"seq_length": 4, "train_tokens": 3 * 8}
    state.detach()
    state._count_remaining()
    assert state.train_tokens == 3 * 8


def test_ranks_of_one_batch_count_it_once(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(6))
    state, model = ScheduleState(scheduler(unit="sample")), Model()
    state._attach(model, model, CPU, ranks_of_batch=2)
    state._begin()
    model(torch.ones(2, 16, dtype=torch.long))
    state._step(1)
    assert (state.train_tokens, state.scheduler.progress) == (3 * 8, 3 * 2)


def test_a_checkpoint_without_a_state_raises():
    with pytest.raises(ValueError, match="SequenceLengthWarmup"):
        ScheduleState(scheduler())._resume(None)


def test_without_a_training_there_is_no_count():
    state, _ = state_of()
    assert state._is_finished() is False
    state.detach()
    with pytest.raises(ValueError, match="count_tokens"):
        state.count_tokens()
    assert state.figures()["seq_length"] == 4


def test_a_training_that_never_had_the_full_length_warns():
    state, _ = state_of()
    falling = SequenceLengthScheduler(4, 16, duration=8, step_size=4, pacing=lambda share: float(share < 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ScheduleState(falling)._warn_of_short_training(6)  # the length falls again
        state._warn_of_short_training(1000)
    with pytest.warns(UserWarning, match="the training ends") as caught:
        state._warn_of_short_training(999)
    assert caught[0].filename == __file__


def test_a_training_starts_over_from_the_progress_before_the_first_one():
    state, _ = state_of()
    state.scheduler.progress = 5
    for _ in range(2):
        state._start()
        assert (state.train_tokens, state.scheduler.progress) == (0, 5)
        state._step(3)
    assert state.scheduler.progress == 8


def test_what_was_seen_before_a_training_is_not_of_its_first_step():
    state, train = state_of(unit="token")
    state._begin()
    train()
    assert state.count_tokens() == 8
    model = Model()
    state._attach(model, model, CPU)
    state._start()
    state._begin()
    model(torch.ones(1, 16, dtype=torch.long))
    state._step(1)
    assert (state.train_tokens, state.scheduler.progress) == (4, 4)
