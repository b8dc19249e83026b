"""Sequence-length warmup in the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ...schedule.token_lr import follow_source
from ...utils.modules import CONTEXT_PART
from ..schedule_state import ScheduleState, context_mesh_of
from .added import AddedCallback
from .parallelism import check_loss_of_parts, gather_each_row_once, share_tokens, take_over


class SequenceLengthWarmup(ScheduleState, AddedCallback):
    """Trains a Trainer's model on sequences of the scheduled length. Evaluation keeps the full length.

    Example::

        trainer = Trainer(...)
        SequenceLengthWarmup(SequenceLengthScheduler(64, 1024, duration=10_000)).add_to(trainer)

    Each optimizer step advances the schedule by 1, or, if its unit is "token" or "sample", by the number of tokens or
    samples that all ranks trained on. A training that resumes loads the schedule's state from the checkpoint. Another
    one starts at the progress that the schedule had before its first training.

    Batches are cut when the Trainer takes them for a step, before it counts their labels. Every log gets `seq_length`
    and `train_tokens`, the number of tokens that all ranks have trained on, after cutting and without padding.

    The ranks that share the tokens or heads of a model must get the same batches, which count once. Those of
    `ParallelismConfig(cp_size=...)` and `DistributedConfig(tp_size=...)` do.

    Args:
        scheduler: the schedule of sequence lengths.
        total_tokens: end the training after the step that reaches this number of tokens, counted as `train_tokens`. It
            still ends before at `max_steps` or after `num_train_epochs`. None: it ends only there.
        resize_options: options for `resize_batch`: `mode`, `keys`, ...

    Raises:
        TypeError: when training begins, `resize_batch` does not have an option.
        ValueError: the warmup was passed in `callbacks`; when training begins, it does not support the training's
            arguments, or the checkpoint has no state of this callback, or one of another configuration.
    """

    cuts_batches = True
    _batches: nn.Module = nn.Identity()  # through which batches pass; a training attaches to one of its own
    _mesh: DeviceMesh | None = None  # of the ranks that share rows by the Trainer's parallelism_config

    def add_to(self, trainer: Trainer) -> None:
        """Cuts the training batches of a Trainer. `trainer.remove_callback` ends it.

        Raises:
            ValueError: the trainer has a SequenceLengthWarmup already, or a `parallelism_config` that is not supported.
        """
        if any(isinstance(callback, SequenceLengthWarmup) for callback in trainer.callback_handler.callbacks):
            raise ValueError("trainer must have one SequenceLengthWarmup, got a second; remove_callback removes it")
        self._mesh = take_over(trainer)
        gather_each_row_once(trainer)
        super().add_to(trainer)

    def resized(self, trainer: Trainer, batch: Any) -> Any:
        resized = self._batches(batch)
        if CONTEXT_PART in resized:
            check_loss_of_parts(trainer)
        return resized

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        _check_arguments(args)
        model, rates = kwargs["model"], kwargs["lr_scheduler"]
        if self._mesh is not None:
            share_tokens(model, self._mesh)
        if state.global_step == 0:
            self._start()
        else:
            self._resume(self.saved_state(state))
        if context_mesh_of(model) is not None and not args.average_tokens_across_devices:
            raise ValueError("average_tokens_across_devices must be True for a model with ContextParallel, got False")
        ranks_of_batch = getattr(model, "tp_size", None) or 1  # as the Trainer finds it
        self._batches = nn.Identity()
        called = nn.DataParallel(model) if args.n_gpu > 1 else model  # as the Trainer wraps it
        self._attach(self._batches, called, args.device, ranks_of_batch)
        self._warn_of_short_training(max(0, state.max_steps - state.global_step))
        follow_source(rates.scheduler if isinstance(rates, AcceleratedScheduler) else rates)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.attachment is None or self.attachment.seq_length is None:  # no batch was cut
            raise ValueError("add_to must be called with the trainer that trains, before it trains")
        self._begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._is_finished():  # then the Trainer does as after `max_steps`
            control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS
            control.should_evaluate |= (
                args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= state.global_step
            )
        self._step(1)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._warn_of_short_training()
        self.detach()


def _check_arguments(args: TrainingArguments) -> None:
    if getattr(args, "precompute_ref_log_probs", False):  # of TRL's trainers
        raise ValueError("precompute_ref_log_probs must be False, got True: the log probabilities are of whole rows")
    config: Any = getattr(args, "parallelism_config", None)
    if getattr(config, "sp_size", 1) > 1:
        raise ValueError(f"parallelism_config must have sp_size=1, got {config.sp_size}; use cp_size")
