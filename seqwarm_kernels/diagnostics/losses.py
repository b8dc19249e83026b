"""Loss ratios and spikes, as training goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..utils.checks import check_int, check_real, check_state_entries


@dataclass
class LossHistory:
    """What there is to know of all losses so far. A spike is a ratio above `spike_threshold`, or no finite loss."""

    spike_threshold: float
    steps: int = 0
    spikes: int = 0
    min_loss: float | None = None  #: the smallest finite one; None before it
    max_loss_ratio: float | None = None  #: the largest finite one; None before it

    def add(self, loss: float) -> tuple[float, bool]:
        """Count the loss of the next step; its ratio to the smallest before it, and whether it is a spike."""
        ratio = self._ratio(loss)
        is_spike = not math.isfinite(loss) or ratio > self.spike_threshold
        self.steps += 1
        self.spikes += is_spike
        if math.isfinite(loss):
            self.min_loss = loss if self.min_loss is None else min(self.min_loss, loss)
        if math.isfinite(ratio):
            self.max_loss_ratio = ratio if self.max_loss_ratio is None else max(self.max_loss_ratio, ratio)
        return ratio, is_spike

    def _ratio(self, loss: float) -> float:
        if not math.isfinite(loss):
            return loss
        if self.min_loss is None or loss == self.min_loss:
            return 1.0
        return loss / self.min_loss if self.min_loss > 0 else math.nan  # the ratio is one of losses above zero

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "spike_threshold"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises ValueError or TypeError before anything is changed."""
        check_state_entries(state_dict, self.state_dict())
        for name in ("steps", "spikes"):
            check_int(name, state_dict[name], minimum=0)
        for name in ("min_loss", "max_loss_ratio"):
            if state_dict[name] is not None:
                check_real(name, state_dict[name])
        if state_dict["spikes"] > state_dict["steps"]:
            raise ValueError(f"spikes must be at most steps {state_dict['steps']}, got {state_dict['spikes']}")
        vars(self).update(state_dict)
