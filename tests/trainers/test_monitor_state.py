"""The state that the monitors of all trainers share."""

import pytest
import torch

from seqwarm_kernels.trainers.monitor_state import MonitorState

from ..support.arguments import check_accepted_or_named


def test_a_step_without_a_loss_keeps_the_figures_of_the_newest_record():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    state = MonitorState([], 1.2, 20)
    state.start([optimizer], steps=0, writes=False)
    for step in (1, 2):
        state.add_loss(torch.tensor(1.0 / step))
        state.step(losses_are_parts=False)
        state.step(losses_are_parts=False)
    assert state.figures()["monitor/step"] == 3
    assert state.state_dict()["steps"] == 4


@pytest.mark.parametrize("name", ["outputs", "spike_threshold", "read_every"])
def test_an_argument_is_accepted_or_named(name):
    arguments = {"outputs": [], "spike_threshold": 1.2, "read_every": 20}

    def call(value):
        MonitorState(**{**arguments, name: [value] if name == "outputs" else value})

    check_accepted_or_named(name, call)
