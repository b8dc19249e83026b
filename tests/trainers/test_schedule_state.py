"""The state that the warmups of all trainers share."""

import warnings

import pytest
import torch

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.trainers.schedule_state import ScheduleState

from ..support.arguments import JUNK, check_accepted_or_named

CPU = torch.device("cpu")


class Model(torch.nn.Module):
    def forward(self, input_ids, attention_mask=None):
        return input_ids


def scheduler(**options):
    return SequenceLengthScheduler(4, 16, duration=1000, step_size=4, **options)


@pytest.mark.parametrize("unit", ["step", "token", "sample"])
def test_a_step_that_has_no_token_left_is_reported_once(unit):
    state, model = ScheduleState(scheduler(unit=unit), {}), Model()
    state.attach(model, CPU)
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


@pytest.mark.parametrize("name", ["mode", "remainder", "seq_dim", "keep_last_token", "copy", "return_information"])
def test_an_option_is_accepted_or_named_before_training(name):
    check_accepted_or_named(name, lambda value: ScheduleState(scheduler(), {name: value}))
    if name not in ("copy", "keep_last_token"):
        with pytest.raises((TypeError, ValueError), match=name):
            ScheduleState(scheduler(), {name: "nonsense"})


def test_a_scheduler_is_accepted_or_named():
    for value in JUNK:
        with pytest.raises(TypeError, match="scheduler must be a SequenceLengthScheduler"):
            ScheduleState(value, {})
