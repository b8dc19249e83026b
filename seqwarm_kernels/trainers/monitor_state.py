"""The state that the monitors of all trainers share: a `TrainingMonitor` for each training, and its counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..diagnostics import TrainingMonitor
from ..diagnostics.monitor import Output, checked_options

#: Numbers of a record that are not in the trainer's logs: the trainer logs its own loss, and spikes are counted.
_LEFT_OUT = ("loss", "is_spike")


class MonitorState:
    """A trainer's monitor, over one training or several.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Attributes:
        monitor: the monitor of the current training, or of the last one; None before the first.
        saved: counts from a checkpoint, for the training that starts next.
        grad_norm: the norm of the gradients of the next step, before clipping. None takes it from `.grad` after it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range.
    """

    def __init__(self, outputs: Sequence[Output], spike_threshold: float, read_every: int) -> None:
        self.spike_threshold, self.read_every = checked_options(outputs, spike_threshold, read_every)
        self.outputs = tuple(outputs)
        self.monitor: TrainingMonitor | None = None
        self.saved: Mapping[str, Any] | None = None
        self.grad_norm: Tensor | float | None = None
        self._losses: list[Tensor] = []

    def start(self, optimizers: Sequence[Any], *, steps: int, writes: bool) -> None:
        """Starts a training with a new monitor.

        Args:
            optimizers: the optimizers of the training.
            steps: steps already made. If no counts exist for them, counting starts at this step.
            writes: whether this rank writes to the outputs.

        Raises:
            ValueError: there is not exactly one optimizer, or the saved counts are invalid.
        """
        if len(optimizers) != 1:
            raise ValueError(f"Monitor needs a training with one optimizer, got {len(optimizers)}")
        monitor = TrainingMonitor(
            optimizers[0],
            *(self.outputs if writes else ()),
            spike_threshold=self.spike_threshold,
            read_every=self.read_every,
        )
        monitor.load_state_dict(self._counts_after(steps) or {**monitor.state_dict(), "steps": steps})
        self.monitor, self.saved, self.grad_norm, self._losses = monitor, None, None, []

    def _counts_after(self, steps: int) -> Mapping[str, Any]:
        """Returns the counts of the checkpoint, or of the training that this process continues, or an empty mapping."""
        if self.saved is not None:
            return self.saved if steps else {}
        own = self.state_dict()
        return own if own and own["steps"] == steps else {}

    def add_loss(self, loss: Tensor) -> None:
        """Adds the loss of one batch of the next optimizer step."""
        self._losses.append(loss.detach().reshape(()))

    def step(self, *, losses_are_parts: bool) -> None:
        """Records an optimizer step. A step without a loss has no record, but is counted.

        Args:
            losses_are_parts: the added losses are parts of the step's loss, which is their sum. If False, the step's
                loss is their mean.
        """
        assert self.monitor is not None
        grad_norm, self.grad_norm = self.grad_norm, None
        if self._losses:
            losses, self._losses = torch.stack(self._losses), []
            self.monitor.observe(losses.sum() if losses_are_parts else losses.mean(), grad_norm)
        else:
            counts, newest = self.monitor.state_dict(), self.monitor.last_record
            self.monitor.load_state_dict({**counts, "steps": counts["steps"] + 1})
            self.monitor.last_record = newest

    def figures(self) -> dict[str, float]:
        """Returns figures of the newest record that was read, for the trainer's own logs; empty before the first."""
        record = None if self.monitor is None else self.monitor.last_record
        if self.monitor is None or record is None:
            return {}
        numbers = {**record.numbers(), "spikes": self.monitor.spikes}
        return {
            f"monitor/{name}": value for name, value in numbers.items() if name not in _LEFT_OUT and value is not None
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers, or an empty dict before the first training."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
