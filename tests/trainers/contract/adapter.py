"""What a trainer must do to be held to the contract: one subclass each."""

from __future__ import annotations

import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch

from ...support.ranks import set_environment
from ...support.token_rates import PEAK, SCHEDULERS
from .cases import ADAM_RATE, LEARNING_RATE, Case, Model, loader
from .oracle import Rule
from .record import Record, record_of

READ_EVERY = 3  #: steps until a monitor reads its records


class Adapter(abc.ABC):
    """A warmup in a trainer, for one training or several.

    Attributes:
        rule: how the trainer makes the loss of a step.
        warns_of_short: it warns of a training that ends before the schedule.
        knows_steps_of_epochs: it knows how many steps a number of epochs has before they are made.
        ends_by_tokens: it ends by itself after `total_tokens`.
        keeps_schedule: checkpoints have the schedule's state. Else its length follows from the trainer's own count.
        shards_rows: it gives each rank its part of the rows of a model with ContextParallel.
        has_monitor: it has a Monitor, which writes to `records`.
    """

    rank: ClassVar[int] = 0  # of this process, among those that have different batches
    world_size: ClassVar[int] = 1
    processes: ClassVar[int] = 1
    rule: ClassVar[Rule]
    warns_of_short: ClassVar[bool] = True
    knows_steps_of_epochs: ClassVar[bool] = False
    ends_by_tokens: ClassVar[bool] = True
    keeps_schedule: ClassVar[bool] = True
    shards_rows: ClassVar[bool] = True
    has_monitor: ClassVar[bool] = True
    Monitor: ClassVar[Any]
    warmup: Any

    def __init__(self, case: Case, model: Model, folder: Path) -> None:
        self.case, self.model, self.folder = case, model, folder
        self.records: list[Any] = []
        self.monitors = []
        if case.is_watched and self.has_monitor:
            self.monitors.append(self.Monitor(self.records.append, read_every=READ_EVERY, spike_threshold=1.0))

    @classmethod
    def supports(cls, case: Case) -> bool:
        return True

    @staticmethod
    def join_ranks(rank: int, port: int, *, share_rows: bool = False) -> None:
        """Makes this process one of two, before any training. They have different batches, or share each row."""
        Adapter.processes = 2
        Adapter.rank, Adapter.world_size = (0, 1) if share_rows else (rank, 2)
        set_environment(rank, port)

    @abc.abstractmethod
    def fit(self, resume: int | None = None) -> None:
        """A training from the start, or from the checkpoint of a step in `folder`. A second call is a new training."""

    @abc.abstractmethod
    def evaluate(self) -> None:
        """An evaluation outside of any training."""

    @abc.abstractmethod
    def logged(self) -> dict[int, dict[str, float]]:
        """The figures in the trainer's own log, by step."""

    def progress(self) -> int | None:
        """The schedule's progress, if it has one of its own."""
        return self.warmup.state_dict()["scheduler"]["progress"] if self.keeps_schedule else None

    def source(self) -> Callable[[], int]:
        """The source of a learning rate by tokens."""
        return self.warmup.count_tokens

    def run(self, resume: int | None = None) -> Record:
        self.model.calls.clear()
        self.model.ask = self.source() if self.case.asks else None
        self.fit(resume)
        return self.record(resume)

    def record(self, resume: int | None = None) -> Record:
        return record_of(self.model, self.rule.loss, resume or 0)

    def batches(self, **settings: Any) -> Any:
        """The batches of this rank."""
        return loader(self.case, rank=self.rank, world_size=self.world_size, **settings)

    def epoch_steps(self) -> int:
        return self.case.epoch_steps // self.world_size

    def optimizer(self) -> tuple[torch.optim.Optimizer, Any]:
        """A new optimizer, and its learning rates."""
        rates = self.case.rates
        kind, rate = (torch.optim.AdamW, ADAM_RATE) if self.case.adam else (torch.optim.SGD, LEARNING_RATE)
        optimizer = kind(self.model.parameters(), lr=PEAK if rates else rate)
        optimizer.register_step_post_hook(self.model.note_step)
        if rates:
            return optimizer, SCHEDULERS[rates][0](optimizer, self.source())
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
