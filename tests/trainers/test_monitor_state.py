"""The state that the monitors of all trainers share."""

from types import SimpleNamespace

import torch

from seqwarm_kernels.trainers.monitor_state import MonitorState


def test_losses_on_several_devices_meet_on_the_first():
    """As with the replicas of nn.DataParallel. The meta device stands for a second GPU."""
    state, seen = MonitorState([], 1.2, 20), []
    state.monitor = SimpleNamespace(observe=seen.append)
    for device in ("meta", "cpu"):
        state.add_loss(torch.ones(1, device=device))
    state.step(losses_are_parts=False)
    assert [(loss.device.type, loss.shape) for loss in seen] == [("meta", ())]
