"""A monitor of the optimizer in Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from ...diagnostics import TrainingMonitor
from ...diagnostics.monitor import Output
from ..monitor_state import Monitoring


class Monitor(Callback):
    """A `TrainingMonitor` of a Trainer's optimizer.

        Trainer(..., callbacks=[Monitor(JsonLines("monitor.jsonl"))])

    The loss is the mean of what `training_step` returned for the batches of an optimizer step, on this rank. A step
    that it returned None for is counted, and has no record. The norm is that of the gradients that the optimizer got:
    after clipping. Rank zero writes. Checkpoints keep the counts; a training that resumes from a checkpoint without
    them counts from there on.

    Args:
        outputs, spike_threshold, read_every: as for `TrainingMonitor`.

    Raises:
        TypeError, ValueError: an argument does not fit; when training begins, there is more than one optimizer, or it
            keeps no second moment; `training_step` returned no loss: at the first step of manual optimisation, else
            when training ends and no step had one.
    """

    def __init__(self, *outputs: Output, spike_threshold: float = 1.2, read_every: int = 20) -> None:
        self._monitoring = Monitoring(outputs, spike_threshold, read_every)
        self._steps = 0

    @property
    def monitor(self) -> TrainingMonitor | None:
        """That of the training under way, or of the last one; None before the first."""
        return self._monitoring.monitor

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._steps = trainer.global_step
        self._monitoring.start(trainer.optimizers, steps=self._steps, writes=trainer.is_global_zero)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):  # that of automatic optimisation is divided by the number of batches of a step
            divided_by = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
            self._monitoring.add_loss(loss * divided_by)
        if trainer.global_step > self._steps:  # else gradients are being accumulated
            self._steps = trainer.global_step
            # Of automatic optimisation a step may leave out its batch, and with it the loss.
            self._monitoring.step(losses_are_parts=False, may_begin_without=pl_module.automatic_optimization)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._monitoring.close()
        self._monitoring.check_losses()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._monitoring.close()

    def state_dict(self) -> dict[str, Any]:
        return self._monitoring.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Not in load_state_dict, which is called for a checkpoint that is only tested as well."""
        if trainer.training:
            self._monitoring.saved = checkpoint["callbacks"].get(self.state_key) or None
