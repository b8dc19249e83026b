"""What a monitor says of one step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StepRecord:
    """One optimizer step. Numbers that are not finite are kept as they are: NaN, inf.

    √v is the root of an optimizer's second moment as stored, without Adam's bias correction; sums and maxima are over
    all elements of all parameters.
    """

    step: int  #: 1 is the first
    loss: float
    loss_ratio: float  #: the loss over the smallest finite one of all steps before; 1 at first
    is_spike: bool  #: the ratio is above the monitor's threshold, or the loss is not finite
    variance_l1: float  #: Σ √v
    variance_max: float  #: the largest √v
    momentum_l1: float  #: Σ |m|
    momentum_max: float  #: the largest |m|
    grad_norm: float | None  #: l2; None where no parameter had a gradient
    extra: Mapping[str, float] = field(default_factory=dict)  #: what the caller added

    def numbers(self) -> dict[str, int | float | bool | None]:
        """All of it by name, what the caller added behind the rest."""
        own = {name: value for name, value in vars(self).items() if name != "extra"}
        return {**own, **self.extra}

    def to_json(self) -> str:
        """One line. JSON has no NaN and no infinity: they become null."""
        finite = {name: _or_null(value) for name, value in self.numbers().items()}
        return json.dumps(finite, allow_nan=False)


def _or_null(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else None


#: Names that a caller's own numbers cannot have.
TAKEN = frozenset(StepRecord.__dataclass_fields__)
