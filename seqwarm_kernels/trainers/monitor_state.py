"""What the monitors of all trainers share: a `TrainingMonitor` for each training, and what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..diagnostics import TrainingMonitor
from ..diagnostics.monitor import Output, check_options


class Monitoring:
    """A monitor on its way through a training.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Attributes:
        monitor: that of the training under way, or of the last one; None before the first.

    Raises:
        TypeError, ValueError: an argument does not fit.
    """

    def __init__(self, outputs: Sequence[Output], spike_threshold: float, read_every: int) -> None:
        check_options(outputs, spike_threshold, read_every)
        self.outputs = tuple(outputs)
        self.spike_threshold = spike_threshold
        self.read_every = read_every
        self.monitor: TrainingMonitor | None = None
        self.saved: Mapping[str, Any] | None = None  #: of a checkpoint, for the training that starts next
        self._losses: list[Tensor] = []
        self._had_loss = self._skipped = False

    def start(self, optimizers: Sequence[Any], *, steps: int, writes: bool) -> None:
        """A training begins.

        Args:
            optimizers: the training's.
            steps: that it has behind it. Where nothing was counted of them, counting begins there.
            writes: outputs are this rank's to write.

        Raises:
            ValueError: there is not one optimizer, or it keeps no second moment, or what was saved is no monitor's.
        """
        if len(optimizers) != 1:
            raise ValueError(
                f"a trainer's Monitor takes a training with one optimizer, got {len(optimizers)}; make a "
                "TrainingMonitor for each of them, and call its observe() after the optimizer's step"
            )
        monitor = TrainingMonitor(
            optimizers[0],
            *(self.outputs if writes else ()),
            spike_threshold=self.spike_threshold,
            read_every=self.read_every,
        )
        monitor.load_state_dict(self._counts_after(steps) or {**monitor.state_dict(), "steps": steps})
        self.monitor, self.saved, self._losses = monitor, None, []
        self._had_loss = self._skipped = False

    def _counts_after(self, steps: int) -> Mapping[str, Any]:
        """Those of the checkpoint, or of the training that goes on in this process; else empty."""
        if self.saved is not None:
            return self.saved if steps else {}
        own = self.state_dict()
        return own if own and own["steps"] == steps else {}

    def add_loss(self, loss: Tensor) -> None:
        """Of one of the batches that the next optimizer step learns from."""
        self._losses.append(loss.detach())
        self._had_loss = True

    def step(self, *, losses_are_parts: bool, may_begin_without: bool = False) -> None:
        """The optimizer made a step; its loss is the sum of those added, if they are parts of it, else their mean.

        A step without a loss has no record, and its number is left out.

        Args:
            losses_are_parts: of the step's loss.
            may_begin_without: a loss may still come with a later step: `check_losses` when the training ends.

        Raises:
            ValueError: no loss was added since the training began.
        """
        assert self.monitor is not None
        if self._losses:
            losses, self._losses = _on_one_device(self._losses), []
            self.monitor.observe(losses.sum() if losses_are_parts else losses.mean())
        elif self._had_loss or may_begin_without:
            self._skipped = True
            counts = self.monitor.state_dict()
            self.monitor.load_state_dict({**counts, "steps": counts["steps"] + 1})
        else:
            raise _no_loss()

    def check_losses(self) -> None:
        """Raises ValueError where steps were made, and none had a loss."""
        if self._skipped and not self._had_loss and self.monitor is not None and self.monitor.min_loss is None:
            raise _no_loss()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; empty before the first training."""
        return {} if self.monitor is None else self.monitor.state_dict()

    def close(self) -> None:
        if self.monitor is not None:
            self.monitor.close()


def _on_one_device(losses: Sequence[Tensor]) -> Tensor:
    """The first's; the replicas of nn.DataParallel, threads, add theirs in any order."""
    ordered = sorted(losses, key=lambda loss: loss.device.index or 0)
    return torch.stack([loss.reshape(()).to(ordered[0].device) for loss in ordered])


def _no_loss() -> ValueError:
    return ValueError(
        "Monitor needs the loss of a step, got none: the model must return it in training; where the loss is "
        "computed elsewhere, call the observe() of a TrainingMonitor there"
    )
