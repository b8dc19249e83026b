"""The state that the monitors of all trainers share."""

import torch

from seqwarm_kernels.trainers.monitor_state import MonitorState


def test_a_step_without_a_loss_keeps_the_figures_of_the_newest_record():
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    state = MonitorState()
    state._start([optimizer], steps=0, writes=False)
    for step in (1, 2):
        state._add_loss(torch.tensor(1.0 / step))
        state._step(losses_are_parts=False)
        state._step(losses_are_parts=False)
    assert state.figures()["monitor/step"] == 3
    assert state.state_dict()["steps"] == 4
