"""Sequence-length warmup in Lightning's Trainer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from ...resizing.containers import is_container
from ...schedule.scheduler import SequenceLengthScheduler
from ...schedule.token_lr import follow_source
from ..schedule_state import ScheduleState, context_mesh_of
from .loader_state import warn_without_loader_state


class SequenceLengthWarmup(Callback):
    """Trains on batches of the scheduled length. Validation, testing and the sanity check keep the full length.

    Example::

        Trainer(..., callbacks=[SequenceLengthWarmup(SequenceLengthScheduler(64, 1024, duration=10_000))])

    Each step of `trainer.global_step` advances the schedule by 1, or, if its unit is "token" or "sample", by the number
    of tokens or samples that all ranks trained on. A training with a new Trainer starts at the progress that the
    schedule had before its first training. A training that resumes loads the schedule's state from the checkpoint.

    Logs `seq_length` at each step, and `train_tokens` at each step that a logger gets. `train_tokens` is the number of
    tokens that all ranks have trained on, after cutting and without padding. Batches that the module skips,
    because `training_step` returns None or `on_train_batch_start` returns -1, count, too.

    The DataLoader must give the ranks of `parallel.ContextParallel` the same batches (`use_distributed_sampler=False`).
    These share the rows of a training batch after cutting if they divide them, else the tokens, and the batch counts
    once. Pass the module's model all entries of a batch, as in `self.model(**batch)`: "context_part" says which of both
    it has. Validation, testing and prediction are on whole rows. Batches that the ranks of tensor parallelism share
    (`ModelParallelStrategy`) count once.

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

    def __init__(
        self, scheduler: SequenceLengthScheduler, *, total_tokens: int | None = None, **resize_options: Any
    ) -> None:
        self._schedule_state = ScheduleState(scheduler, resize_options, total_tokens)
        self._steps = 0
        self._unhook: Callable[[], None] | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if "dataloader_iter" in inspect.signature(pl_module.training_step).parameters:
            raise TypeError("training_step must take a batch, got dataloader_iter, whose batches no callback sees")
        warn_without_loader_state(trainer)
        if trainer.global_step == 0:
            self._schedule_state.start()
        self._steps = trainer.global_step
        self._attach(trainer, pl_module)
        for config in trainer.lr_scheduler_configs:
            follow_source(config.scheduler)
        if trainer.max_steps > 0:  # else epochs or a time end the training
            self._warn_of_short_training(trainer, trainer.max_steps - self._steps)

    def _attach(self, trainer: Trainer, module: LightningModule) -> None:
        """Hooks the strategy's `batch_to_device`.

        Every batch passes it before any callback or `training_step`. A hook on a forward would be too late for a loss
        that `training_step` computes of the batch, and `on_train_batch_start` cannot change a tuple.
        """
        self._detach()
        strategy, resize = trainer.strategy, _ResizeModule()
        to_device = strategy.batch_to_device
        self._schedule_state.attach(resize, module, module.device, _ranks_of_batch(trainer))
        is_shared = context_mesh_of(module) is not None

        def resized_to_device(batch: Any, *args: Any, **kwargs: Any) -> Any:
            batch = to_device(batch, *args, **kwargs)
            if not trainer.training or batch is None:
                return batch
            if is_shared and not isinstance(batch, MutableMapping):  # it says what a rank has of it
                raise TypeError(
                    f"a training batch must be a mapping for a model with ContextParallel, got {type(batch).__name__}"
                )
            return resize.resized(batch)

        strategy.__dict__["batch_to_device"] = resized_to_device
        self._unhook = lambda: strategy.__dict__.pop("batch_to_device")

    def _detach(self) -> None:
        if self._unhook is not None:
            self._unhook()
        self._unhook = None
        self._schedule_state.detach()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._schedule_state.begin()

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
        trainer.should_stop |= self._schedule_state.is_finished()
        every = trainer.log_every_n_steps
        self._schedule_state.step(steps, count=every > 0 and trainer.global_step % every == 0)
        metrics = self._schedule_state.metrics().items()
        # float64 on the CPU: exact, and does not wait for a device
        pl_module.log_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in metrics})

    def count_tokens(self) -> int:
        """The tokens that all ranks have trained on, with the current step: the `source` of a `TokenLR`.

        The first call after a batch waits for the device and the ranks, so all ranks must make it.
        """
        return self._schedule_state.count_tokens()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._schedule_state.count_remaining()
        self._warn_of_short_training(trainer)
        self._detach()

    def _warn_of_short_training(self, trainer: Any, steps: int = 0) -> None:
        if not trainer.fast_dev_run:  # an attribute that Lightning does not declare
            self._schedule_state.warn_of_short_training(steps)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._detach()

    def state_dict(self) -> dict[str, Any]:
        return self._schedule_state.state_dict()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Counts the tokens of steps that were not logged. Every rank runs this hook, so ranks can exchange counts."""
        self._schedule_state.count_remaining()
        checkpoint["callbacks"][self.state_key] = self.state_dict()

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Loads the state here, because Lightning calls load_state_dict also for a checkpoint that is only tested."""
        if trainer.training:
            self._schedule_state.resume(checkpoint["callbacks"].get(self.state_key))


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
