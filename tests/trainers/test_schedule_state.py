"""The state that the warmups of all trainers share."""

import warnings

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.trainers.schedule_state import ScheduleState

from ..support.arguments import JUNK

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


def scheduler(**options):
    return SequenceLengthScheduler(4, 16, duration=1000, step_size=4, **options)


@pytest.mark.parametrize("options", [{"backend": "nope"}, {"mode": "junk"}, {"seq_dim": 2}, {"truncat": True}])
def test_options_that_fit_no_batch_are_refused_at_once(options):
    with pytest.raises((TypeError, ValueError), match=next(iter(options))):
        ScheduleState(scheduler(), options)


@pytest.mark.parametrize("unit", ["step", "token", "sample"])
def test_a_step_that_has_no_token_left_is_reported_once(unit):
    state, model = ScheduleState(scheduler(unit=unit), {}), Model()
    state.attach(model, model, CPU)
    on_the_right = (torch.arange(16) < 5).long().expand(2, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.step(1)  # without a forward, as in a step that was skipped
        model(torch.ones(2, 16, dtype=torch.long), on_the_right)
        model(torch.ones(2, 16, dtype=torch.long), on_the_right.flip(1))
        state.step(1)
    model(torch.ones(2, 16, dtype=torch.long), on_the_right * 0)
    with pytest.warns(UserWarning, match="no token of a step's batches is left .*the attention mask of every row is 0"):
        state.step(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.ones(2, 16, dtype=torch.long), on_the_right * 0)
        state.step(1)


@pytest.mark.parametrize("has_batch", [True, False])
def test_ranks_exchange_their_counts_once_in_a_step_also_one_without_a_batch(monkeypatch, has_batch):
    exchanged = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: exchanged.append(total.add_(5).tolist()))
    state, model = ScheduleState(scheduler(unit="token"), {}, total_tokens=30), Model()
    state.attach(model, model, CPU)
    for step in (1, 2):
        state.begin()
        if has_batch:
            model(torch.ones(2, 16, dtype=torch.long))
        tokens = step * (8 * has_batch + 5)
        assert [state.count_tokens(), state.count_tokens()] == [tokens] * 2
        assert state.is_finished() == (tokens >= 30)
        state.step(1)
        assert len(exchanged) == step
        assert state.scheduler.progress == tokens
        assert state.count_tokens() == tokens  # between steps one rank may ask alone
        assert len(exchanged) == step
    for later in (1, 2):
        state.begin()
        assert state.count_tokens() == tokens + 5 * later
    assert state.scheduler.progress == tokens


def test_a_scheduler_is_accepted_or_named():
    for value in JUNK:
        with pytest.raises(TypeError, match="scheduler must be a SequenceLengthScheduler"):
            ScheduleState(value, {})
