"""Sequence-length warmup, and a monitor of the optimizer, in the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakValueDictionary

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    raise ImportError("transformers and accelerate are needed: pip install seqwarm_kernels[huggingface]") from error
from torch import nn

from ...schedule.scheduler import SequenceLengthScheduler
from ..schedule_state import Progress
from .monitor import Monitor as Monitor

#: By the configuration of their schedules: a callback that the Trainer makes of a checkpoint's JSON finds its own here.
_alive: WeakValueDictionary[tuple[Any, ...], Progress] = WeakValueDictionary()


class SequenceLengthWarmup(TrainerCallback, ExportableState):
    """Trains a Trainer's model on sequences of the scheduled length; evaluation keeps the full length.

        Trainer(..., callbacks=[SequenceLengthWarmup(SequenceLengthScheduler(64, 1024, duration=10_000))])

    The schedule takes a step with each optimizer step: 1, or, where its unit is "token" or "sample", what all ranks
    trained on. A training that does not resume starts where the schedule stood before the first one; one that resumes
    takes the schedule's state from the checkpoint.

    Every log gets `seq_length` and `train_tokens`, the tokens trained on so far by all ranks: after cutting and without
    padding, while the Trainer's own `num_input_tokens_seen` and `total_flos` are of whole batches. Reporters come
    before the callbacks that are passed to a Trainer; so that they report both as well, put this one first:

        trainer.callback_handler.callbacks.insert(0, trainer.pop_callback(SequenceLengthWarmup))

    Losses must be computed by the model: a `compute_loss_func` gets logits that are cut and labels that are not. Where
    the batches of one step keep different shares of their labels, they are weighted by their labels before cutting.

    Args:
        scheduler: when sequences are how long.
        resize_options: for `resize_batch`: `mode`, `keys`, ...

    Attributes:
        progress: what a checkpoint keeps.

    Raises:
        TypeError: `scheduler` is none, or `resize_batch` does not take an option.
        ValueError: at the beginning of a training: its arguments do not go together with the warmup, or the checkpoint
            has no state of this callback, or that of a scheduler of another configuration.
    """

    def __init__(self, scheduler: SequenceLengthScheduler | Mapping[str, Any], **resize_options: Any) -> None:
        if isinstance(scheduler, Mapping):
            self._progress = _progress_of(scheduler)
        else:
            self._progress = Progress(scheduler, resize_options)
            _alive[_key(_configuration(scheduler))] = self._progress

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module | None = None,
        **kwargs: Any,
    ) -> None:
        _check_arguments(args)
        if state.global_step == 0:
            self._progress.start()
        else:  # the Trainer itself hands it over only with restore_callback_states_from_checkpoint
            states: Any = state.stateful_callbacks
            saved = states.get(type(self).__name__)
            self._progress.resume(saved["attributes"]["progress"] if isinstance(saved, Mapping) else None)
        assert model is not None
        self._progress.attach(model)  # not its wrapper: that of distributed or compiled training calls this one

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._progress.step(1, args.device)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if self._progress.attachment is not None and logs is not None:
            for record in (logs, *state.log_history[-1:]):  # the history has a copy, made before this
                record.update(self._progress.metrics())

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.detach()

    def detach(self) -> None:
        """Leave the model as it was. A training that broke off has not done so; the next one of this callback will."""
        self._progress.detach()

    @property
    def progress(self) -> dict[str, Any]:
        return self._progress.state_dict()

    @progress.setter
    def progress(self, saved: dict[str, Any]) -> None:
        self._progress.resume(saved)

    def state(self) -> dict[str, Any]:
        """For trainer_state.json: arguments and attributes of a callback like this one."""
        return {
            "args": {"scheduler": _configuration(self._progress.scheduler)},
            "attributes": {"progress": self.progress},
        }


def _check_arguments(args: TrainingArguments) -> None:
    if args.label_smoothing_factor:
        raise ValueError(
            f"label_smoothing_factor must be 0, got {args.label_smoothing_factor}: the Trainer smooths the labels of "
            "the whole batch, outside of the model; compute a smoothed loss in the model's forward"
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"one process must train on one GPU, got {args.n_gpu} in DataParallel; start the training with torchrun or "
            "accelerate launch, or set CUDA_VISIBLE_DEVICES to one GPU"
        )
    split = getattr(getattr(args, "parallelism_config", None), "non_data_parallel_size", 1)
    if split > 1:
        raise ValueError(
            f"parallelism_config must give each rank batches of its own, got {split} ranks that share one; leave "
            "tp_size, cp_size and sp_size at 1"
        )


def _configuration(scheduler: SequenceLengthScheduler) -> dict[str, Any]:
    return {name: value for name, value in scheduler.state_dict().items() if name != "progress"}


def _key(configuration: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(configuration.items()))


def _progress_of(configuration: Mapping[str, Any]) -> Progress:
    """A checkpoint holds no scheduler, whose pacing may be a function: it is that of the callback to be replaced."""
    progress = _alive.get(_key(configuration))
    if progress is None:
        raise ValueError(
            f"the checkpoint's schedule is none of this training's: {dict(configuration)}; pass a SequenceLengthWarmup "
            "with a scheduler of this configuration, or start a new training from the checkpoint's weights"
        )
    return progress
