"""Sequence-length warmup in the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from accelerate.scheduler import AcceleratedScheduler
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from ...schedule.scheduler import SequenceLengthScheduler
from ...schedule.token_lr import follow_source
from ...utils.modules import CONTEXT_PART
from ..schedule_state import ScheduleState, context_mesh_of
from .added import AddedCallback
from .parallelism import check_loss_of_parts, gather_each_row_once, share_tokens, take_over


class SequenceLengthWarmup(AddedCallback):
    """Trains a Trainer's model on sequences of the scheduled length. Evaluation keeps the full length.

    Example::

        trainer = Trainer(...)
        SequenceLengthWarmup(SequenceLengthScheduler(64, 1024, duration=10_000)).add_to(trainer)

    Each optimizer step advances the schedule by 1, or, if its unit is "token" or "sample", by the number of tokens or
    samples that all ranks trained on. A training that does not resume starts at the progress that the schedule had
    before its first training. A training that resumes loads the schedule's state from the checkpoint.

    Batches are cut when the Trainer takes them for a step, before it counts their labels. So its own counts, a
    `compute_loss_func`, metrics and TRL's trainers see what the model is trained on. The first label of each row, which
    the loss of a causal language model leaves out, is not counted, also where the Trainer alone would count it.

    Every log gets `seq_length` and `train_tokens`, the number of tokens that all ranks have trained on, after cutting
    and without padding. The Trainer's own `num_input_tokens_seen` and `total_flos` count cut batches.

    A model with `parallel.ContextParallel` must compute the loss. `get_train_dataloader` must give the ranks of its
    mesh the same batches. These share the rows of a batch after cutting if they divide them, else the tokens, and the
    batch counts once. The model is evaluated on whole rows. With `ParallelismConfig(cp_size=...)` the Trainer's loaders
    give such batches, also in evaluation, whose metrics get each row once. Training begins with applying
    `ContextParallel` to a converted model, in place of Accelerate's context parallelism. Batches of a model that was
    loaded with `DistributedConfig(tp_size=...)` count once for its ranks, in metrics, too.

    Args:
        scheduler: the schedule of sequence lengths.
        total_tokens: end the training after the step that reaches this number of tokens, counted as `train_tokens`. It
            still ends before at `max_steps` or after `num_train_epochs`. None: it ends only there.
        resize_options: options for `resize_batch`: `mode`, `keys`, ...

    Attributes:
        progress: the state that a checkpoint keeps.

    Raises:
        TypeError: when training begins, `resize_batch` does not have an option.
        ValueError: the warmup was passed in `callbacks`; when training begins, it does not support the training's
            arguments, or the checkpoint has no state of this callback, or one of another configuration.
    """

    cuts_batches = True

    def __init__(
        self, scheduler: SequenceLengthScheduler, *, total_tokens: int | None = None, **resize_options: Any
    ) -> None:
        self._schedule_state = ScheduleState(scheduler, resize_options, total_tokens)
        self._batches = nn.Identity()  # through which batches pass
        self._mesh: DeviceMesh | None = None  # of the ranks that share rows by the Trainer's parallelism_config

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
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        lr_scheduler: Any = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(args)
        assert model is not None
        if self._mesh is not None:
            share_tokens(model, self._mesh)
        if state.global_step == 0:
            self._schedule_state.start()
        else:
            self._schedule_state.resume(self.saved_progress(state))
        if context_mesh_of(model) is not None and not args.average_tokens_across_devices:
            raise ValueError("average_tokens_across_devices must be True for a model with ContextParallel, got False")
        ranks_of_batch = getattr(model, "tp_size", None) or 1  # as the Trainer finds it
        self._schedule_state.attach(self._batches, model, args.device, ranks_of_batch)
        self._schedule_state.warn_of_short_training(max(0, state.max_steps - state.global_step))
        follow_source(lr_scheduler.scheduler if isinstance(lr_scheduler, AcceleratedScheduler) else lr_scheduler)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        attachment = self._schedule_state.attachment
        if attachment is None or attachment.seq_length is None:  # the Trainer has taken batches, but not cut them
            raise ValueError("add_to must be called with the trainer that trains, before it trains")
        self._schedule_state.begin()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._schedule_state.is_finished():  # then the Trainer does as after `max_steps`
            control.should_training_stop = True
            control.should_save |= args.save_strategy == SaveStrategy.STEPS
            control.should_evaluate |= (
                args.eval_strategy == IntervalStrategy.STEPS and args.eval_delay <= state.global_step
            )
        self._schedule_state.step(1)

    def figures(self) -> dict[str, int]:
        """The length of the last step, and the tokens so far."""
        return self._schedule_state.metrics()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._schedule_state.warn_of_short_training()
        self.detach()

    def count_tokens(self) -> int:
        """The tokens that all ranks have trained on, with the current step: the `source` of a `TokenLR`.

        The first call after a batch waits for the device and the ranks, so all ranks must make it.
        """
        return self._schedule_state.count_tokens()

    def detach(self) -> None:
        """Stops cutting, as at the end of a training. The next training of the Trainer begins anew."""
        self._schedule_state.detach()

    @property
    def progress(self) -> dict[str, Any]:
        return self._schedule_state.state_dict()


def _check_arguments(args: TrainingArguments) -> None:
    if getattr(args, "precompute_ref_log_probs", False):  # of TRL's trainers
        raise ValueError("precompute_ref_log_probs must be False, got True: the log probabilities are of whole rows")
    config: Any = getattr(args, "parallelism_config", None)
    if getattr(config, "sp_size", 1) > 1:
        raise ValueError(f"parallelism_config must have sp_size=1, got {config.sp_size}; use cp_size")
