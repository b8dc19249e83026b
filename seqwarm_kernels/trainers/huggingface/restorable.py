"""A callback whose state is in the checkpoints of the Hugging Face Trainer."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerState


class RestorableCallback(TrainerCallback):
    """A callback that loads its `progress` itself when a training resumes.

    The state is in trainer_state.json, among the `stateful_callbacks`, by a name that no class has. States that have
    the name of an `ExportableState` are for callbacks which the Trainer can make anew from JSON: with
    `restore_callback_states_from_checkpoint` it does so, without outputs and pacing functions.
    """

    progress: Any  #: the state that a checkpoint keeps, as JSON

    @property
    def name_in_checkpoint(self) -> str:
        return f"seqwarm_kernels.{type(self).__name__}"

    def save_progress(self, state: TrainerState) -> None:
        """Puts the progress into what the next checkpoint saves."""
        states: Any = state.stateful_callbacks  # a dict, not the list that it is annotated as
        states[self.name_in_checkpoint] = self.progress

    def saved_progress(self, state: TrainerState) -> Any:
        """The progress in the checkpoint from which the Trainer resumes, or None if it has none of this callback."""
        states: Any = state.stateful_callbacks
        return states.get(self.name_in_checkpoint)
