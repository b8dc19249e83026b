"""Callbacks that `add_to` adds to a Hugging Face Trainer, and the methods by which such a Trainer calls them.

Private names of transformers and accelerate that this folder uses, and the test that fails when one changes:

- `Trainer._get_grad_norm`, since no event has norms before clipping: `test_a_training_equals_the_loop`
- `_is_accelerate_prepared` in `evaluation_loop`: `test_two_ranks_train_as_the_loop`
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .derived import give_methods
from .label_count import counts_first_labels, with_counted_labels
from .parallelism import ranks_of_rows


class AddedCallback(TrainerCallback):
    """A callback of a Trainer whose methods call it, beside the Trainer's own events.

    Its state is in trainer_state.json, among the `stateful_callbacks`, by a name that no class has. States that have
    the name of an `ExportableState` are for callbacks which the Trainer can make anew from JSON: with
    `restore_callback_states_from_checkpoint` it does so, without outputs and pacing functions.
    """

    cuts_batches = False  #: whether `resized` is called

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as JSON."""
        raise NotImplementedError

    @property
    def name_in_checkpoint(self) -> str:
        return f"seqwarm_kernels.{type(self).__name__}"

    def saved_state(self, state: TrainerState) -> Any:
        """The state in the checkpoint from which the Trainer resumes, or None if it has none of this callback."""
        states: Any = state.stateful_callbacks  # a dict, not the list that it is annotated as
        return states.get(self.name_in_checkpoint)

    def add_to(self, trainer: Trainer) -> None:
        """Adds the callback to a Trainer. `trainer.remove_callback` removes it.

        Raises:
            ValueError: the Trainer has this callback already.
        """
        if self in trainer.callback_handler.callbacks:
            raise ValueError(f"trainer must not have this {type(self).__name__} yet")
        give_methods(trainer, _Methods)
        trainer.add_callback(self)

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        name = type(self).__name__
        raise ValueError(f"callbacks must not hold {name}; call {name}(...).add_to(trainer) instead")

    def train_loader(self) -> Any:
        """Returns what the Trainer trains on in place of its own loader, or None."""

    def resized(self, trainer: Trainer, batch: Any) -> Any:
        """Returns what the Trainer trains on in place of a batch."""
        raise NotImplementedError

    def take_loss(self, loss: Tensor) -> None:
        """Gets the loss of a batch, which is the batch's part of the loss of its step."""

    def take_grad_norm(self, norm: Any) -> None:
        """Gets the norm of a step's gradients before clipping."""

    def figures(self) -> dict[str, Any]:
        """Figures for the logs of a training, by name."""
        return {}


class _Methods(Trainer if TYPE_CHECKING else object):  # type: ignore[misc]
    """Methods in front of those of a Trainer's own class. They call the callbacks that the Trainer has at that time."""

    def _added_callbacks(self) -> list[AddedCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, AddedCallback)]

    def get_train_dataloader(self) -> Any:
        for callback in self._added_callbacks():
            if (loader := callback.train_loader()) is not None:
                return loader
        return super().get_train_dataloader()

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Resizes the batches of a step before the Trainer counts their labels."""
        callbacks = [callback for callback in self._added_callbacks() if callback.cuts_batches]
        counts_first = bool(callbacks) and counts_first_labels(self)
        taken: list[tuple[Any, Any]] = []  # what the Trainer counts, and trains on

        def resized() -> Iterator[Any]:
            for batch in epoch_iterator:
                for callback in callbacks:
                    batch = callback.resized(self, batch)
                taken.append((with_counted_labels(batch) if counts_first else batch, batch))
                yield taken[-1][0]

        samples, count = super().get_batch_samples(resized(), num_batches, device)
        return [next((batch for counted, batch in taken if counted is each), each) for each in samples], count

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        for callback in self._added_callbacks():
            callback.take_loss(loss)
        return loss

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Adds figures, before any reporter gets the logs."""
        for callback in self._added_callbacks() if self.is_in_train else ():
            logs.update(callback.figures())
        super().log(logs, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Puts the callbacks' state into trainer_state.json, which the Trainer writes after the model."""
        states: Any = self.state.stateful_callbacks
        for callback in self._added_callbacks():
            states[callback.name_in_checkpoint] = callback.state_dict()
        super().save_model(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Accelerate marks a model that is evaluated first, and training then would not wrap it in DDP."""
        output = super().evaluation_loop(*args, **kwargs)
        if not self.is_in_train and not self.is_fsdp_enabled:
            self.model.__dict__.pop("_is_accelerate_prepared", None)
        return output

    def get_cp_size(self) -> int:
        """The number by which the Trainer divides counts of whole rows. Under `ContextParallel` it counts parts."""
        return 1 if ranks_of_rows(self) > 1 else super().get_cp_size()

    def get_total_train_batch_size(self, args: TrainingArguments) -> int:
        return super().get_total_train_batch_size(args) // ranks_of_rows(self)

    def _get_grad_norm(self, *args: Any, **kwargs: Any) -> Any:
        norm = super()._get_grad_norm(*args, **kwargs)
        for callback in self._added_callbacks():
            callback.take_grad_norm(norm)
        return norm
