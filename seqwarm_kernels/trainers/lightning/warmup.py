"""Sequence-length warmup, and a monitor of the optimizer, in Lightning's Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError("lightning is needed: pip install seqwarm_kernels[lightning]") from error

from ...resizing.containers import is_container
from ...schedule.scheduler import SequenceLengthScheduler
from ..schedule_state import Progress
from .monitor import Monitor as Monitor


class SequenceLengthWarmup(Callback):
    """Trains on batches of the scheduled length; validation, testing and the sanity check keep the full length.

        Trainer(..., callbacks=[SequenceLengthWarmup(SequenceLengthScheduler(64, 1024, duration=10_000))])

    The schedule takes a step with each of `trainer.global_step`: 1, or, where its unit is "token" or "sample", what all
    ranks trained on. A training with a new Trainer starts where the schedule stood before the first one; one that
    resumes takes the schedule's state from the checkpoint.

    Logs `seq_length` with each step, and `train_tokens` with each that a logger gets: the tokens trained on so far by
    all ranks, after cutting and without padding.

    Args:
        scheduler: when sequences are how long.
        resize_options: for `resize_batch`: `mode`, `keys`, ... The tensors of a batch that is a tuple or list are
            called "0", "1", ...; one tensor is called "0".

    Raises:
        TypeError: `scheduler` is none, `resize_batch` does not take an option or a batch, or `training_step` takes a
            dataloader_iter.
        ValueError: a checkpoint to resume from has no state of this callback, or that of a scheduler of another
            configuration.
    """

    def __init__(self, scheduler: SequenceLengthScheduler, **resize_options: Any) -> None:
        self._progress = Progress(scheduler, resize_options)
        self._steps = 0
        self._close: Callable[[], None] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise TypeError(
                "training_step must take a batch, got dataloader_iter, whose batches no callback sees; resize them in "
                "it with scheduler.resize"
            )
        if trainer.global_step == 0:
            self._progress.start()
        self._steps = trainer.global_step
        self._open(trainer)

    def _open(self, trainer: Trainer) -> None:
        # Every batch passes the strategy's batch_to_device, on one device or many, with a data module or without, and
        # no callback or training_step has seen it yet. A hook on a forward would be too late for a loss that
        # training_step computes of the batch, and on_train_batch_start can change no tuple.
        self._remove()
        strategy, door = trainer.strategy, _Door()
        to_device = strategy.batch_to_device
        self._progress.attach(door)

        def resized_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = to_device(batch, *args, **kwargs)
            return door.resized(batch) if trainer.training and batch is not None else batch

        strategy.__dict__["batch_to_device"] = resized_to_device
        self._close = lambda: strategy.__dict__.pop("batch_to_device")

    def _remove(self) -> None:
        if self._close is not None:
            self._close()
        self._close = None
        self._progress.detach()

    def on_train_batch_end(
        self,
        trainer: Any,  # whose log_every_n_steps has no annotation
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        steps = trainer.global_step - self._steps
        if steps == 0:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        every = trainer.log_every_n_steps
        self._progress.step(steps, pl_module.device, count=every > 0 and trainer.global_step % every == 0)
        metrics = self._progress.metrics().items()
        # float64 on the CPU: exact, and nothing waits for a device
        pl_module.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in metrics})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._progress.settle(pl_module.device)
        self._remove()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        return self._progress.state_dict()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """With the tokens of steps that no logger got; here, where every rank passes."""
        self._progress.settle(pl_module.device)
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Not in load_state_dict, which is called for a checkpoint that is only tested as well."""
        if trainer.training:
            self._progress.resume(checkpoint["callbacks"].get(self.state_key))


class _Door(nn.Module):
    """Batches go through it as they are, unless a scheduler is attached to it."""

    def forward(self, batch: Any) -> Any:
        return batch

    def resized(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return self({"0": batch})["0"]
        if is_container(batch):
            return self(batch)
        if not isinstance(batch, (tuple, list)):
            raise TypeError(
                "a training batch must be a tensor, or a mapping, dataclass, tuple or list of tensors, got "
                f"{type(batch).__name__}"
            )
        entries = self({str(index): entry for index, entry in enumerate(batch)}).values()
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
