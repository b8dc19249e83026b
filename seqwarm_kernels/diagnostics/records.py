"""The record of one optimizer step, and the history of losses that loss ratios and spikes are computed from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..utils.checks import check_int, check_real, check_state_entries


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Numbers that are not finite are kept as NaN and infinity.

    √v is the square root of the optimizer's second moment as stored, without Adam's bias correction. Sums and maxima
    run over all elements of all parameters. Numbers of a moment that the optimizer does not keep, or does not have
    before its first step, are None.
    """

    step: int  #: 1 for the first step
    loss: float
    #: The loss divided by the smallest finite loss of all earlier steps; 1 for the first step. NaN if the loss is not
    #: finite, or the smallest loss is not above zero.
    loss_ratio: float
    is_spike: bool  #: the ratio is above the monitor's threshold, or the loss is not finite
    variance_l1: float | None  #: Σ √v
    variance_max: float | None  #: the largest √v
    momentum_l1: float | None  #: Σ |m|
    momentum_max: float | None  #: the largest |m|
    grad_norm: float | None  #: l2 norm of the gradients; None if no parameter had a gradient
    extra: Mapping[str, float] = field(default_factory=dict)  #: the caller's own numbers

    def numbers(self) -> dict[str, int | float | bool | None]:
        """All numbers by name. The caller's own numbers come last."""
        own = {name: value for name, value in vars(self).items() if name != "extra"}
        return {**own, **self.extra}

    def to_json(self) -> str:
        """One line of JSON. NaN and infinity, which JSON cannot represent, become null."""
        numbers = self.numbers()
        finite = {name: value for name, value in numbers.items() if value is not None and math.isfinite(value)}
        return json.dumps({**dict.fromkeys(numbers), **finite})


#: Names that the caller's own numbers must not have.
RESERVED_NAMES = frozenset(StepRecord.__dataclass_fields__)


@dataclass
class LossHistory:
    """Counts and extremes of all losses so far. A spike is a ratio above `spike_threshold`, or a non-finite loss."""

    spike_threshold: float
    steps: int = 0
    spikes: int = 0
    min_loss: float | None = None  #: the smallest finite loss; None before the first finite loss
    max_loss_ratio: float | None = None  #: the largest finite ratio; None before the first finite ratio

    def add(self, loss: float) -> tuple[float, bool]:
        """Count the loss of the next step. Returns its ratio to the smallest earlier loss, and whether it spikes."""
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
            return math.nan
        if self.min_loss is None:
            return 1.0
        return loss / self.min_loss if self.min_loss > 0 else math.nan  # a ratio needs losses above zero

    def state_dict(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "spike_threshold"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        Raises:
            TypeError, ValueError: `state_dict` is not a state of a LossHistory. Nothing was changed.
        """
        check_state_entries(state_dict, self.state_dict())
        checked: dict[str, Any] = {name: check_int(name, state_dict[name], minimum=0) for name in ("steps", "spikes")}
        for name in ("min_loss", "max_loss_ratio"):
            checked[name] = None if state_dict[name] is None else check_real(name, state_dict[name])
        vars(self).update(checked)
