"""The position in the data in checkpoints of the Hugging Face Trainer."""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, has_length

from ...data.loading.resumable_loader import ResumableLoader
from .restorable import RestorableCallback


class LoaderState(RestorableCallback):
    """Keeps the state of the `ResumableLoader` that a Trainer trains on in its checkpoints.

    Example::

        Trainer(..., callbacks=[LoaderState(loader)])

    A training that resumes continues with the next batch, with any number of ranks and workers. The Trainer itself
    would skip batches of a DataLoader, which a `ResumableLoader` is not, and with `ignore_data_skip` it would not load
    the checkpoint's random streams, which dropout draws from: this callback does so before the first step. It looks
    for the checkpoint in `resume_from_checkpoint` of the arguments and in `output_dir`.

    A loader with a length trains for one epoch at most. For more, make its sampler `infinite=True`, and set
    `max_steps`: the Trainer ends every epoch after as many batches as the first had.

    Args:
        loader: the loader that `get_train_dataloader` returns.

    Attributes:
        progress: the state that a checkpoint keeps.

    Raises:
        TypeError: `loader` is not a ResumableLoader.
        ValueError: when training begins, `ignore_data_skip` is False, or the steps of the training need more batches
            than one epoch of a loader with a length, or the checkpoint has no state of this callback, or a state of
            another configuration.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        super().__init__()
        self._resumes_from: Path | None = None  # until the first step
        if not isinstance(loader, ResumableLoader):
            raise TypeError(f"loader must be a ResumableLoader, got {type(loader).__name__}")
        self._loader = loader

    @property
    def progress(self) -> dict[str, Any]:
        return self._loader.state_dict()

    @progress.setter
    def progress(self, saved: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(saved)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not args.ignore_data_skip:
            raise ValueError(
                "ignore_data_skip must be True with LoaderState, which continues with the next batch itself"
            )
        self._check_one_epoch(state.max_steps, args.gradient_accumulation_steps)
        if state.global_step == 0:
            return
        saved = self.saved_progress(state)
        if saved is None:
            raise ValueError(
                "the checkpoint was written without LoaderState; resume without it, or start a new training"
            )
        self.progress = saved
        self._resumes_from = _random_streams_of(args, state)
        if self._resumes_from is None:
            warnings.warn(
                "the random streams do not continue, so dropout differs from that of an uninterrupted training: "
                f"output_dir has no checkpoint-{state.global_step} of this training with the random streams of this "
                "rank; pass resume_from_checkpoint to TrainingArguments",
                stacklevel=2,
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._resumes_from is not None:  # after the loader has drawn its seed, as in the Trainer
            Trainer._load_rng_state(SimpleNamespace(args=args), str(self._resumes_from))  # type: ignore[arg-type]
            self._resumes_from = None

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.save_progress(state)

    def _check_one_epoch(self, max_steps: int, accumulation: int) -> None:
        """The Trainer neither knows the lengths of later epochs nor, if it resumes, a last step of fewer batches."""
        if has_length(self._loader) and max_steps * accumulation > len(self._loader):
            raise ValueError(
                f"loader must have infinite=True and max_steps must be set to train for {max_steps} steps of "
                f"{accumulation} batches, got a loader of {len(self._loader)} batches: the Trainer ends every epoch "
                "after as many batches as the first had, and a training that resumes leaves out a last step of fewer "
                "batches"
            )


def _random_streams_of(args: TrainingArguments, state: TrainerState) -> Path | None:
    """The checkpoint that holds the random streams of this rank. No event tells a callback its folder."""
    file = "rng_state.pth" if args.world_size == 1 else f"rng_state_{args.process_index}.pth"
    given = args.resume_from_checkpoint
    folders = [Path(given)] if isinstance(given, (str, os.PathLike)) else []
    folders.append(Path(args.output_dir or ".", f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))
    return next((folder for folder in folders if (folder / file).is_file() and _is_of(folder, state)), None)


def _is_of(folder: Path, state: TrainerState) -> bool:
    """Whether a checkpoint is of the training with this state, and not another one's of the same step."""
    path = folder / TRAINER_STATE_NAME
    if not path.is_file():
        return False
    saved = TrainerState.load_from_json(str(path))
    return (saved.global_step, saved.log_history) == (state.global_step, state.log_history)
