"""The position in the data in checkpoints of the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from ...data.loading.resumable_loader import ResumableLoader
from .added import AddedCallback


class LoaderState(AddedCallback):
    """Trains a Trainer on a `ResumableLoader`, whose state is kept in checkpoints.

    Example::

        trainer = Trainer(model, arguments)
        LoaderState(loader).add_to(trainer)

    A training that resumes continues with the next batch, with any number of ranks and workers, and with the random
    streams of the checkpoint, which dropout draws from.

    A loader with a length trains for one epoch at most. For more, make its sampler `infinite=True`, and set
    `max_steps`: the Trainer ends every epoch after as many batches as the first had.

    Args:
        loader: the loader that the Trainer trains on.

    Raises:
        TypeError: `loader` is not a ResumableLoader.
        ValueError: it was passed in `callbacks`; when training begins, a loader with a length has too few batches, or
            the checkpoint has no state of this callback, or one of another configuration.
    """

    def __init__(self, loader: ResumableLoader) -> None:
        if not isinstance(loader, ResumableLoader):
            raise TypeError(f"loader must be a ResumableLoader, got {type(loader).__name__}")
        self._loader = loader

    def add_to(self, trainer: Trainer) -> None:
        """Lets a Trainer train on the loader.

        Sets `ignore_data_skip` of its arguments: a training that resumes would skip batches otherwise.
        """
        trainer.args.ignore_data_skip = True
        super().add_to(trainer)

    def train_loader(self) -> ResumableLoader:
        return self._loader

    def state_dict(self) -> dict[str, Any]:
        return self._loader.state_dict()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._check_one_epoch(state.max_steps, args.gradient_accumulation_steps)
        if state.global_step == 0:
            return
        saved = self.saved_state(state)
        if saved is None:
            raise ValueError("the checkpoint was written without LoaderState; resume without it")
        self._loader.load_state_dict(saved)

    def _check_one_epoch(self, max_steps: int, accumulation: int) -> None:
        """The Trainer neither knows the lengths of later epochs nor, if it resumes, a last step of fewer batches."""
        if has_length(self._loader) and max_steps * accumulation > len(self._loader):
            raise ValueError(
                f"loader must have infinite=True for {max_steps} steps of {accumulation} batches, got "
                f"{len(self._loader)} batches"
            )
