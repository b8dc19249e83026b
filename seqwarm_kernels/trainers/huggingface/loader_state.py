"""The position in the data in checkpoints of the Hugging Face Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from ...data.loading.resumable_loader import ResumableLoader
from .restorable import RestorableCallback


class LoaderState(RestorableCallback):
    """Keeps the state of the `ResumableLoader` that a Trainer trains on in its checkpoints.

    Example::

        Trainer(..., callbacks=[LoaderState(loader)])

    A training that resumes continues with the next batch, with any number of ranks and workers. The Trainer itself
    would skip batches of a DataLoader, which a `ResumableLoader` is not.

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

    def _check_one_epoch(self, max_steps: int, accumulation: int) -> None:
        """The Trainer neither knows the lengths of later epochs nor, if it resumes, a last step of fewer batches."""
        if has_length(self._loader) and max_steps * accumulation > len(self._loader):
            raise ValueError(
                f"loader must have infinite=True and max_steps must be set to train for {max_steps} steps of "
                f"{accumulation} batches, got a loader of {len(self._loader)} batches: the Trainer ends every epoch "
                "after as many batches as the first had, and a training that resumes leaves out a last step of fewer "
                "batches"
            )
