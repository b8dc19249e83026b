"""The number of tokens that Composer's trainer has trained on, and an end by tokens."""

from __future__ import annotations

from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from ...resizing.functional import resize_batch
from ...schedule.token_lr import follow_source
from ...utils.checks import check_int
from ..schedule_state import context_mesh_of
from .algorithms import SeqLengthWarmup
from .functional import rows_and_length


class TokenCounter(Callback):
    """Counts the tokens that all ranks train on, after all algorithms have cut the batches and without padding.

    Composer's own count, `time/token`, and a max_duration in tokens ("tok") count batches before they are cut. A batch
    that ranks share, in a model with `parallel.ContextParallel`, counts once.

    Example::

        counter = TokenCounter(total_tokens=10**9)
        schedule = TokenLR(optimizer, warmup_tokens=10**7, decay_tokens=10**9, source=counter.count_tokens)
        Trainer(..., optimizers=optimizer, schedulers=schedule, step_schedulers_every_batch=True, callbacks=counter)

    Logs `train_tokens` after each batch. Checkpoints keep it. A training that does not resume starts at 0.

    Args:
        total_tokens: end the training after the batch that reaches this number of tokens. It still ends before at its
            max_duration, of which SeqLengthWarmup's duration is a share. None: it ends only there.

    Attributes:
        train_tokens: number of tokens so far, without those of the current batch.

    Raises:
        TypeError, ValueError: `total_tokens` is not a positive int.
        ValueError: when training begins, it has been reached, or the checkpoint was written without this callback.
    """

    def __init__(self, total_tokens: int | None = None) -> None:
        self.total_tokens = None if total_tokens is None else check_int("total_tokens", total_tokens, minimum=1)
        self.train_tokens = 0
        self._batch_tokens: Tensor | None = None  # of this rank, not counted yet
        self._is_running = False
        self._ranks_of_batch = 1

    def fit_start(self, state: State, logger: Logger) -> None:
        if not state.timestamp.batch.value:
            self.train_tokens = 0  # which an earlier training may have left
        elif not self.train_tokens:
            raise ValueError("the checkpoint was written without TokenCounter; resume without it")
        if self.total_tokens is not None and self.train_tokens >= self.total_tokens:
            raise ValueError(
                f"total_tokens must be more than the {self.train_tokens} tokens so far, got {self.total_tokens}"
            )
        mesh = context_mesh_of(state.model)
        self._ranks_of_batch = 1 if mesh is None else mesh.size()
        self._batch_tokens, self._is_running = None, True
        for scheduler in state.schedulers:
            follow_source(scheduler)

    def batch_start(self, state: State, logger: Logger) -> None:
        warmups = [algorithm for algorithm in state.algorithms if isinstance(algorithm, SeqLengthWarmup)]
        counted = [warmup.num_valid_tokens for warmup in warmups if warmup.num_valid_tokens is not None]
        if counted:
            self._batch_tokens = counted[0]
            return
        _, length = rows_and_length(state.batch)
        _, info = resize_batch(state.batch, max(length, 1), copy=False, return_info=True)
        self._batch_tokens = info.num_valid_tokens

    def count_tokens(self) -> int:
        """The tokens that all ranks have trained on, with the current batch: the `source` of a `TokenLR`.

        The first call in a batch waits for the device and the ranks, so all ranks must make it.
        """
        if not self._is_running:
            raise ValueError("count_tokens needs a running training with this TokenCounter in its callbacks, got none")
        if self._batch_tokens is not None:
            total, self._batch_tokens = self._batch_tokens.clone(), None
            dist.all_reduce(total)
            self.train_tokens += int(total) // self._ranks_of_batch
        return self.train_tokens

    def batch_end(self, state: State, logger: Logger) -> None:
        tokens = self.count_tokens()
        logger.log_metrics({"train_tokens": tokens})
        if self.total_tokens is not None and tokens >= self.total_tokens:
            state.stop_training()

    def fit_end(self, state: State, logger: Logger) -> None:
        self._is_running = False

    def state_dict(self) -> dict[str, Any]:
        return {"train_tokens": self.train_tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.train_tokens = state["train_tokens"]
