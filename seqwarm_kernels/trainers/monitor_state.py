"""The state that the monitors of all trainers share: a `TrainingMonitor` for each training, and its counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..diagnostics import TrainingMonitor
from ..diagnostics.monitor import Output

#: Numbers of a record that are not in the trainer's logs: the trainer logs its own loss, and spikes are counted.
_LEFT_OUT = ("loss", "is_spike")


class MonitorState:
    """What the callbacks named `Monitor` of all trainers share. They derive from it.

    Attributes:
        monitor: the monitor of the current training, or of the last one; None before the first.
    """

    def __init__(self, *outputs: Output, spike_threshold: float = 1.2, read_every: int = 20) -> None:
        self._spike_threshold = spike_threshold
        self._read_every = read_every
        self._outputs = outputs
        self.monitor: TrainingMonitor | None = None
        self._saved: Mapping[str, Any] | None = None  # from a checkpoint, for the training that starts next
        self._grad_norm: Tensor | float | None = None  # before clipping. None: that of `.grad` after the step
        self._losses: list[Tensor] = []

    def _start(self, optimizers: Sequence[Any], *, steps: int, writes: bool) -> None:
        """Starts a training with a new monitor.

        Args:
            steps: steps already made. If no counts exist for them, counting starts at this step.
            writes: whether this rank writes to the outputs.
        """
        if len(optimizers) != 1:
            raise ValueError(f"Monitor needs a training with one optimizer, got {len(optimizers)}")
        monitor = TrainingMonitor(
            optimizers[0],
            *(self._outputs if writes else ()),
            spike_threshold=self._spike_threshold,
            read_every=self._read_every,
        )
        monitor.load_state_dict(self._counts_after(steps) or {**monitor.state_dict(), "steps": steps})
        self.monitor, self._saved, self._grad_norm, self._losses = monitor, None, None, []

    def _counts_after(self, steps: int) -> Mapping[str, Any]:
        """Returns the counts of the checkpoint, or of the training that this process continues, or an empty mapping."""
        if self._saved is not None:
            return self._saved if steps else {}
        own = self.state_dict()
        return own if own and own["steps"] == steps else {}

    def _add_loss(self, loss: Tensor) -> None:
        """Adds the loss of one batch of the next optimizer step."""
        self._losses.append(loss.detach().reshape(()))

    def _step(self, *, losses_are_parts: bool) -> None:
        """Records an optimizer step. A step without a loss has no record, but is counted.

        Args:
            losses_are_parts: the added losses are parts of the step's loss, which is their sum. If False, the step's
                loss is their mean.
        """
        assert self.monitor is not None
        grad_norm, self._grad_norm = self._grad_norm, None
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

    def _close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()
