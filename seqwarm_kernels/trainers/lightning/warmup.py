"""Sequence-length warmup in Lightning's Trainer."""

from __future__ import annotations

import inspect
from collections.abc import MutableMapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ...resizing.containers import is_container
from ...resizing.options import KEEPING_SHAPE
from ...schedule.token_lr import follow_source
from ..schedule_state import ScheduleState, context_mesh_of
from .loader_state import warn_without_loader_state


class SequenceLengthWarmup(ScheduleState, Callback):
    """Trains on batches of the scheduled length. Validation, testing and the sanity check keep the full length.

    Example::

        Trainer(..., callbacks=[SequenceLengthWarmup(SequenceLengthScheduler(64, 1024, duration=10_000))])

    Each step of `trainer.global_step` advances the schedule by 1, or, if its unit is "token" or "sample", by the number
    of tokens or samples that all ranks trained on. A training that resumes loads the schedule's state from the
    checkpoint. One with a new Trainer starts at the progress that the schedule had before its first training.

    Logs `seq_length` at each step, and `train_tokens` at each step that a logger gets: the number of tokens that all
    ranks have trained on, after cutting and without padding. Batches that the module skips, because `training_step`
    returns None or `on_train_batch_start` returns -1, count, too.

    The ranks that share the tokens or heads of a model must get the same batches, which count once: with
    `parallel.ContextParallel`, set `use_distributed_sampler=False`.

    With `parallel.ContextParallel`, and with `mode="segments"` or "window", a batch is a mapping, and the model gets
    all of its entries, as in `self.model(**batch)`.

    Args:
        scheduler: the schedule of sequence lengths.
        total_tokens: end the training after the step that reaches this number of tokens, counted as `train_tokens`. It
            still ends before at `max_steps` or `max_epochs`. None: it ends only there.
        resize_options: options for `resize_batch`: `mode`, `keys`, ... The tensors of a named tuple have the names of
            its fields. Those of another tuple or list are named "0", "1", ...; a single tensor is named "0".

    Raises:
        TypeError: when training begins, `resize_batch` does not have an option, or `training_step` takes a
            dataloader_iter.
        ValueError: a checkpoint to resume from has no state of this callback, or one of another configuration.
    """

    _strategy: Any = None  # which has this callback's `batch_to_device`

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise TypeError("training_step must take a batch, got dataloader_iter, whose batches no callback sees")
        warn_without_loader_state(trainer)
        if trainer.global_step == 0:
            self._start()
        self._steps = trainer.global_step
        self._hook(trainer, pl_module)
        for config in trainer.lr_scheduler_configs:
            follow_source(config.scheduler)
        if trainer.max_steps > 0 and not trainer.fast_dev_run:  # else epochs or a time end the training
            self._warn_of_short_training(trainer.max_steps - self._steps)

    def _hook(self, trainer: Trainer, module: LightningModule) -> None:
        """Hooks the strategy's `batch_to_device`.

        Every batch passes it before any callback or `training_step`. A hook on a forward would be too late for a loss
        that `training_step` computes of the batch, and `on_train_batch_start` cannot change a tuple.
        """
        resize = _ResizeModule()
        self._attach(resize, module, module.device, _ranks_of_batch(trainer))
        to_device = trainer.strategy.batch_to_device
        has_additions = context_mesh_of(module) is not None or self._options.get("mode") in KEEPING_SHAPE

        def resized_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = to_device(batch, *args, **kwargs)
            if not trainer.training or batch is None:
                return batch
            if has_additions and not isinstance(batch, MutableMapping):  # entries are added
                raise TypeError(
                    "a training batch must be a mapping with ContextParallel, segments or a window, "
                    f"got {type(batch).__name__}"
                )
            return resize.resized(batch)

        self._strategy = trainer.strategy
        vars(self._strategy)["batch_to_device"] = resized_to_device

    def detach(self) -> None:
        if self._strategy is not None:
            del self._strategy.batch_to_device
        self._strategy = None
        super().detach()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._begin()

    def on_train_batch_end(
        self,
        trainer: Any,  # its log_every_n_steps has no annotation
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        steps = trainer.global_step - self._steps
        if steps == 0:  # gradients are being accumulated
            return
        self._steps = trainer.global_step
        trainer.should_stop |= self._is_finished()
        every = trainer.log_every_n_steps
        self._step(steps, count=every > 0 and trainer.global_step % every == 0)
        # float64 on the CPU: exact, and does not wait for a device
        figures = {name: torch.tensor(value, dtype=torch.float64) for name, value in self.figures().items()}
        pl_module.log_dict(figures)

    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self._count_remaining()
        if not trainer.fast_dev_run:
            self._warn_of_short_training()
        self.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self.detach()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Counts the tokens of steps that were not logged. Every rank runs this hook, so ranks can exchange counts."""
        self._count_remaining()
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Loads the state here, because Lightning calls load_state_dict also for a checkpoint that is only tested."""
        if trainer.training:
            self._resume(checkpoint["callbacks"].get(self.state_key))


def _ranks_of_batch(trainer: Trainer) -> int:
    """The number of ranks to which Lightning's sampler gives the same batches: those of tensor parallelism."""
    sampler = trainer.distributed_sampler_kwargs
    return 1 if sampler is None else trainer.world_size // sampler["num_replicas"]


class _ResizeModule(nn.Module):
    """Returns the entries of a batch as they are, unless a scheduler is attached to this module."""

    def forward(self, *entries: Any) -> tuple[Any, ...]:
        return entries

    def resized(self, batch: Any) -> Any:
        if isinstance(batch, Tensor) or is_container(batch):
            return self(batch)[0]
        if not isinstance(batch, (tuple, list)):
            raise TypeError(f"a training batch must be tensors or a container of them, got {type(batch).__name__}")
        if hasattr(batch, "_fields"):
            return type(batch)(*self(dict(zip(batch._fields, batch, strict=True)))[0].values())
        return type(batch)(self(*batch))
