"""A monitor of the optimizer in Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from ...diagnostics.moments import gradient_norm
from ..monitor_state import MonitorState


class Monitor(MonitorState, Callback):
    """A `TrainingMonitor` of a Trainer's optimizer.

    Example::

        Trainer(..., callbacks=[Monitor(JsonLines("monitor.jsonl"))])

    The loss is the mean of the losses that `training_step` returned for the batches of an optimizer step, on this rank.
    A step whose `training_step` returned None is counted, and has no record. The gradient norm is taken before
    Lightning clips; in manual optimization it is that of the gradients that the optimizer gets. Rank zero writes.
    Checkpoints keep the counts. If a checkpoint has no counts, a training that resumes from it starts to count there.

    Loggers get the figures of the newest record, "monitor/step" and so on.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Attributes:
        monitor: the monitor of the current training, or of the last one; None before the first.

    Raises:
        TypeError, ValueError: `TrainingMonitor` refuses an argument.
        ValueError: when training begins, there is more than one optimizer.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step
        self._start(trainer.optimizers, steps=self._steps, writes=trainer.is_global_zero)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self._grad_norm = gradient_norm(optimizer)

    def on_train_batch_end(
        self,
        trainer: Any,  # its log_every_n_steps has no annotation
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # Lightning divides it by the number of batches, 1 in manual optimization
            self._add_loss(loss * trainer.accumulate_grad_batches)
        if trainer.global_step > self._steps:  # else gradients are being accumulated
            self._steps = trainer.global_step
            self._step(losses_are_parts=False)
            every = trainer.log_every_n_steps
            if every > 0 and trainer.global_step % every == 0:
                figures = self.figures().items()
                # float64 on the CPU: exact, and does not wait for a device
                pl_module.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in figures})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._close()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Loads the counts here, because Lightning calls load_state_dict also for a checkpoint that is only tested."""
        if trainer.training:
            self._saved = checkpoint["callbacks"].get(self.state_key) or None
