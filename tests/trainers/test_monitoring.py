"""What the monitors of all trainers share."""

from types import SimpleNamespace

import torch

from seqwarm_kernels.trainers.monitor_state import Monitoring


def test_losses_on_several_devices_meet_on_the_first():
    """As those of nn.DataParallel's replicas; the meta device stands for a second GPU."""
    monitoring, seen = Monitoring([], 1.2, 20), []
    monitoring.monitor = SimpleNamespace(observe=seen.append)
    for device in ("meta", "cpu"):
        monitoring.add_loss(torch.ones(1, device=device))
    monitoring.step(losses_are_parts=False)
    assert [(loss.device.type, loss.shape) for loss in seen] == [("meta", ())]
