"""The state that the warmups of Hugging Face and Lightning share."""

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


@pytest.mark.parametrize(("unit", "progress"), [("step", 2), ("token", 3 * 8), ("sample", 3 * 2)])
def test_a_step_of_two_batches_and_one_of_a_single_batch(unit, progress):
    state, train = state_of(unit=unit)
    for batches in (2, 1):
        for _ in range(batches):
            state._begin()
            train()
        state._step(1)
        assert state.figures() == {"seq_length": 4, "train_tokens": state.train_tokens}
    assert (state.train_tokens, state.scheduler.progress) == (3 * 8, progress)


@pytest.mark.parametrize(("unit", "progress"), [("token", 16), ("sample", 4)])
def test_a_count_in_the_middle_of_a_step_is_part_of_the_step(unit, progress):
    state, train = state_of(unit=unit)
    for tokens in (8, 16):
        state._begin()
        train()
        assert state.count_tokens() == tokens
    state._step(1)
    assert state.scheduler.progress == progress


def test_a_training_ends_with_the_step_that_reaches_its_tokens():
    state, model = ScheduleState(scheduler(), total_tokens=16), Model()
    state._attach(model, model, CPU)
    for ends in (False, True):
        state._begin()
        model(torch.ones(2, 16, dtype=torch.long))
        assert state._is_finished() == ends
        state._step(1)


def test_the_length_is_that_of_the_last_step():
    state, train = state_of()
    train()
    state.scheduler.progress = 1000
    assert state.figures()["seq_length"] == 4


def test_after_a_training_nothing_is_cut():
    state, train = state_of(unit="token")
    state._begin()
    assert train().shape == (2, 4)
    state.detach()
    assert train().shape == (2, 16)
    state._step(1)
    assert state.scheduler.progress == 0


def test_a_training_after_an_interrupted_one_attaches_anew():
    state, model = ScheduleState(scheduler()), Model()
    for _ in range(2):
        state._attach(model, model, CPU)
        assert model(torch.ones(2, 16, dtype=torch.long)).shape == (2, 4)


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


def test_tokens_decide_the_length_so_they_do_not_wait():
    state, train = state_of(unit="sample")
    state._begin()
    train()
    state._step(1, count=False)
    assert (state.train_tokens, state.scheduler.progress) == (8, 2)


def test_ranks_of_one_batch_count_it_once(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(6))
    state, model = ScheduleState(scheduler(unit="sample")), Model()
    state._attach(model, model, CPU, ranks_of_batch=2)
    state._begin()
    model(torch.ones(2, 16, dtype=torch.long))
    state._step(1)
    assert (state.train_tokens, state.scheduler.progress) == (3 * 8, 3 * 2)


def test_a_training_starts_over_or_resumes():
    state, train = state_of(unit="token")
    state.scheduler.progress = 5
    state._start()
    state._begin()
    train()
    state._step(1)
    saved = state.state_dict()
    assert (saved["train_tokens"], saved["scheduler"]["progress"]) == (8, 13)
    state._start()
    assert (state.train_tokens, state.scheduler.progress) == (0, 5)
    resumed, _ = state_of(unit="token")
    resumed._resume(saved)
    assert resumed.state_dict() == saved
    resumed._start()
    assert (resumed.train_tokens, resumed.scheduler.progress) == (0, 0)


def test_what_was_seen_before_a_training_is_not_of_its_first_step():
    state, train = state_of(unit="token")
    state._begin()
    train()
    assert state.count_tokens() == 8
    model = Model()
    state._attach(model, model, CPU)
    state._start()
    assert state.count_tokens() == 0
    state._begin()
    model(torch.ones(1, 16, dtype=torch.long))
    state._step(1)
    assert (state.train_tokens, state.scheduler.progress) == (4, 4)


def test_a_checkpoint_without_a_state_or_of_a_training_that_has_ended_raises():
    state = ScheduleState(scheduler(), total_tokens=30)
    saved = {**state.state_dict(), "train_tokens": 30}
    with pytest.raises(ValueError, match="must have a state of SequenceLengthWarmup, got none"):
        state._resume(None)
    with pytest.raises(ValueError, match="total_tokens must be more than the 30 tokens of the checkpoint, got 30"):
        state._resume(saved)
    assert state.train_tokens == 0
    state._resume({**saved, "train_tokens": 29})
    assert state.train_tokens == 29


def test_without_a_training_there_is_no_count():
    state, _ = state_of()
    assert state._is_finished() is False
    state.detach()
    with pytest.raises(ValueError, match="count_tokens needs a running training"):
        state.count_tokens()
    assert state.figures()["seq_length"] == 4


def test_a_training_that_never_had_the_full_length_warns():
    state = ScheduleState(SequenceLengthScheduler(4, 16, duration=2500, step_size=4, unit="token"))
    state.scheduler.progress = 2499
    match = r"ends at 12 of 16 tokens: the schedule grows for 2,500 tokens, and .* 2,499"
    with pytest.warns(UserWarning, match=match) as caught:
        state._warn_of_short_training()
    assert caught[0].filename == __file__
    state, _ = state_of()
    state._warn_of_short_training(1000)
    state.scheduler.progress = 2500
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state._warn_of_short_training()


def test_a_schedule_that_falls_again_has_reached_its_length():
    falling = SequenceLengthScheduler(4, 16, duration=8, step_size=4, pacing=lambda share: float(share < 0.5))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ScheduleState(falling)._warn_of_short_training(6)
