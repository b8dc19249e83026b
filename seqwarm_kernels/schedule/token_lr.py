"""Learning rates by tokens instead of steps: short sequences hold few tokens, so steps would end a decay too early."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..utils.checks import check_choice, check_int, check_real, check_same_configuration, check_state_entries

#: From 1 at x = 0 to 0 at x = 1.
_DECAYS: dict[str, Callable[[float], float]] = {
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
    "linear": lambda x: 1 - x,
}

#: What schedulers of torch change in a parameter group.
_SCHEDULED = ("lr", "momentum", "betas")


class TokenLR(LRScheduler):
    """A learning rate that rises and falls with the number of tokens trained on, t.

    Each parameter group has its own peak: its learning rate before the first scheduler, "initial_lr" in torch. With
    W = `warmup_tokens`, D = `decay_tokens` and F = `final`, the learning rate is the peak times::

        t / W                             while t < W
        F + (1 − F) · d((t − W) / (D − W))    while W <= t < D,  with d(x) = (1 + cos πx) / 2 or 1 − x
        F                                 from D on

    `decay_tokens` counts from the start of the training, like `--lr-decay-tokens` of Megatron-DeepSpeed: pass the
    tokens of the whole training. The learning rate of an optimizer step depends on the tokens of all earlier steps, so
    with `warmup_tokens` the first step has learning rate 0.

    Example::

        schedule = TokenLR(optimizer, warmup_tokens=10_000_000, decay_tokens=total_tokens)
        ...
        optimizer.step()
        schedule.step(tokens_of_all_ranks)

    A trainer calls `step()` without a number, and Accelerate once for each process. Pass `source=warmup.count_tokens`
    of its SequenceLengthWarmup: then only the count matters.

    Args:
        optimizer: Its learning rates are the peaks.
        warmup_tokens: W, 0 or at least 1. Pass as many tokens as without sequence-length warmup: they take more
            steps, since the first ones hold few tokens.
        decay_tokens: D, at least 1 and at least `warmup_tokens`.
        final: F, from 0 to 1. With 1 the learning rate stays at its peak.
        decay: "cosine" or "linear".
        source: A function that returns the number of tokens that all ranks have trained on so far. None: `step` takes
            the number of new tokens.

    Attributes:
        tokens: Number of tokens so far.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of its range.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        warmup_tokens: float,
        decay_tokens: float,
        final: float = 0.1,
        decay: str = "cosine",
        source: Callable[[], int] | None = None,
    ) -> None:
        self.warmup_tokens = check_real("warmup_tokens", warmup_tokens)
        self.decay_tokens = check_real("decay_tokens", decay_tokens)
        if self.warmup_tokens != 0 and self.warmup_tokens < 1:  # a share of the training would warm up for no step
            raise ValueError(f"warmup_tokens must be 0 or at least 1, because it counts tokens, got {warmup_tokens}")
        if self.decay_tokens < max(1, self.warmup_tokens):
            raise ValueError(f"decay_tokens must be at least 1 and at least warmup_tokens, got {decay_tokens}")
        self.final = check_real("final", final)
        if not 0 <= self.final <= 1:
            raise ValueError(f"final must be a share of the peak, from 0 to 1, got {final}")
        check_choice("decay", decay, _DECAYS)
        self.decay = decay
        self.source = source
        super().__init__(optimizer)  # calls step() once

    @property
    def tokens(self) -> int:
        return self.last_epoch

    def step(self, n: int | None = None) -> None:
        """Count tokens and set the learning rates of the next optimizer step. Call this after `optimizer.step()`.

        Args:
            n: Number of tokens of the step, on all ranks. Left out if there is a `source`.

        Raises:
            TypeError: `n` is not an int.
            ValueError: `n` is negative, or missing without a `source`. Nothing was counted.
        """
        is_initial = self.last_epoch < 0  # torch's constructor sets the first learning rates in this way
        self.last_epoch = (0 if is_initial else _counted(self.tokens, n, self.source)) - 1
        super().step()  # adds 1

    def get_lr(self) -> list[float | Tensor]:
        """The learning rate of each parameter group at `tokens`."""
        share = self._share(self.tokens)
        return [peak * share for peak in self.base_lrs]

    def _share(self, tokens: int) -> float:
        if tokens < self.warmup_tokens:
            return tokens / self.warmup_tokens
        if tokens >= self.decay_tokens:
            return self.final
        x = (tokens - self.warmup_tokens) / (self.decay_tokens - self.warmup_tokens)
        return self.final + (1 - self.final) * _DECAYS[self.decay](x)

    def state_dict(self) -> dict[str, Any]:
        """Tokens, peaks and configuration, without `source`."""
        return {"tokens": self.tokens, "base_lrs": list(self.base_lrs), **self._configuration()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the tokens and the peaks. As in torch, the optimizer's own state has its current learning rates.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: Entries are missing, unknown, or of another configuration. Nothing was changed.
        """
        check_state_entries(state_dict, self.state_dict())
        configuration = self._configuration()
        check_same_configuration({name: state_dict[name] for name in configuration}, configuration)
        tokens, peaks = state_dict["tokens"], list(state_dict["base_lrs"])
        share = self._share(tokens)
        self._last_lr = [peak * share for peak in peaks]
        self.last_epoch, self.base_lrs = tokens, peaks

    def _configuration(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("warmup_tokens", "decay_tokens", "final", "decay")}


class StepByTokens(LRScheduler):
    """Any scheduler of torch's interface, with one step for each `tokens_per_step` tokens trained on.

    Example::

        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=total_tokens // tokens_per_step)
        schedule = StepByTokens(cosine, tokens_per_step)
        ...
        optimizer.step()
        schedule.step(tokens_of_all_ranks)

    With the number of tokens of a full batch, the scheduler decays as in a training without sequence-length warmup.

    Args:
        scheduler: The scheduler to step. A ReduceLROnPlateau, which follows a metric, cannot be stepped by tokens.
        tokens_per_step: Number of tokens of all ranks for one step of `scheduler`, at least 1.
        source: As for `TokenLR`.

    Attributes:
        tokens: Number of tokens so far. `scheduler` has made `tokens // tokens_per_step` steps.

    Raises:
        TypeError, ValueError: `tokens_per_step` is not an int, or smaller than 1.
    """

    def __init__(
        self, scheduler: LRScheduler, tokens_per_step: int, *, source: Callable[[], int] | None = None
    ) -> None:
        self.tokens_per_step = check_int("tokens_per_step", tokens_per_step, minimum=1)
        self.scheduler = scheduler
        self.optimizer = scheduler.optimizer
        self.tokens = 0
        self.source = source
        self._step_count = 0  # Accelerate adds to it while gradients accumulate
        groups = [{name: group[name] for name in _SCHEDULED if name in group} for group in self.optimizer.param_groups]
        self._first = copy.deepcopy((scheduler.state_dict(), groups))

    def step(self, n: int | None = None) -> None:
        """Count tokens as `TokenLR.step` does, and make the steps of `scheduler` that they complete.

        A `source` that counts fewer tokens than before is that of another training: `scheduler` starts over.
        """
        tokens = _counted(self.tokens, n, self.source)
        if tokens < self.tokens:
            self._start_over()
        for _ in range(self.tokens // self.tokens_per_step, tokens // self.tokens_per_step):
            self.scheduler.step()
        self.tokens = tokens

    def _start_over(self) -> None:
        state, groups = copy.deepcopy(self._first)
        self.scheduler.load_state_dict(state)
        for group, first in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(first)
        self.tokens = 0

    def get_last_lr(self) -> list[float | Tensor]:
        """The learning rates that `scheduler` has set last."""
        return self.scheduler.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """Tokens, `tokens_per_step` and the state of `scheduler`, without `source`."""
        own = {"tokens": self.tokens, "tokens_per_step": self.tokens_per_step}
        return {**own, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state of the same `tokens_per_step`.

        Raises:
            TypeError, ValueError: As for `TokenLR`. Nothing was changed, nor is it by an error that `scheduler` raises.
        """
        check_state_entries(state_dict, self.state_dict())
        own = {"tokens_per_step": self.tokens_per_step}
        check_same_configuration({name: state_dict[name] for name in own}, own)
        before = copy.deepcopy(self.scheduler.state_dict())
        try:
            self.scheduler.load_state_dict(copy.deepcopy(state_dict["scheduler"]))  # SequentialLR changes what it gets
        except Exception:
            self.scheduler.load_state_dict(before)
            raise
        self.tokens = state_dict["tokens"]


def follow_source(schedule: Any) -> None:
    """Set the learning rates at the start of a training, whose count may be below that of an earlier training."""
    has_source = isinstance(schedule, (TokenLR, StepByTokens)) and schedule.source is not None
    if has_source and schedule.source() != schedule.tokens:
        schedule.step()


def _counted(tokens: int, n: int | None, source: Callable[[], int] | None) -> int:
    """Number of tokens after a step: `n` more than `tokens`, or what `source` has counted."""
    if source is not None:
        return check_int("the result of source", source(), minimum=0)
    if n is None:
        raise ValueError("n must be the number of tokens of the step, got None")
    return tokens + check_int("n", n, minimum=0)
