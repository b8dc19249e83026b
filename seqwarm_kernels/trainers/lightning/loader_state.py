"""The position in the data in checkpoints of Lightning's Trainer."""

from __future__ import annotations

from math import inf
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import CombinedLoader

from ...data.loading.resumable_loader import ResumableLoader
from ...utils.caller_warnings import warn_caller


class LoaderState(Callback):
    """Keeps the state of each `ResumableLoader` of a training in checkpoints.

    Example::

        Trainer(..., callbacks=[LoaderState()])

    A training that resumes continues with the batch after the last one that it trained on, with any number of ranks and
    workers. Lightning's own state of a loader counts a batch that it has fetched and not trained on.

    Raises:
        ValueError: when training begins, the checkpoint has no state of this callback, or one of other loaders.
    """

    def __init__(self) -> None:
        self._states: list[dict[str, Any]] = []  # after the last batch that was trained on
        self._restored: list[dict[str, Any]] | None = None  # until training begins

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._restored is None:
            self._states = _states_of(trainer)
            return
        loaders = _loaders_of(trainer)
        if len(loaders) != len(self._restored):
            raise ValueError(f"the checkpoint must have {len(loaders)} ResumableLoaders, got {len(self._restored)}")
        for loader, state in zip(loaders, self._restored, strict=True):
            loader.load_state_dict(state)
        fetcher = trainer.fit_loop._data_fetcher  # private, and all that can drop the batch it has fetched before
        assert fetcher is not None
        iter(fetcher)
        self._states, self._restored = self._restored, None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.is_last_batch:
            self._end_passes(trainer)
        else:
            self._states = _states_of(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_last_batch:  # `on_train_batch_end` was not called if `on_train_batch_start` has returned -1
            self._end_passes(trainer)

    def _end_passes(self, trainer: Trainer) -> None:
        """Lightning does not request the end of an epoch with a known length."""
        loaders = _loaders_of(trainer)
        for loader in loaders:
            loader.end_pass()
        self._states = [loader.state_dict() for loader in loaders]

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": self._states}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Loads the states here, because Lightning calls load_state_dict also for a checkpoint that is only tested."""
        if not trainer.training:
            return
        if self.state_key not in checkpoint["callbacks"]:
            raise ValueError("the checkpoint was written without LoaderState; resume without it")
        self._restored = checkpoint["callbacks"][self.state_key]["loaders"]


def warn_without_loader_state(trainer: Trainer) -> None:
    is_kept = any(isinstance(callback, LoaderState) for callback in trainer.callbacks)  # type: ignore[attr-defined]
    if trainer.checkpoint_callbacks and not is_kept and _loaders_of(trainer):
        warn_caller("callbacks have no LoaderState(), so a training that resumes may repeat or leave out batches")


def _states_of(trainer: Trainer) -> list[dict[str, Any]]:
    """After the last batch that was trained on. Lightning is one ahead if it does not know the number of batches."""
    is_ahead = trainer.num_training_batches == inf
    return [loader.previous_state_dict() if is_ahead else loader.state_dict() for loader in _loaders_of(trainer)]


def _loaders_of(trainer: Trainer) -> list[ResumableLoader]:
    loaders = CombinedLoader(trainer.train_dataloader).flattened
    return [loader for loader in loaders if isinstance(loader, ResumableLoader)]
