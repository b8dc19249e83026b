"""The state that the callbacks of all trainers share: the schedule, its attachment, and the tokens of all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..models.alibi_layer import AlibiHeads
from ..resizing.functional import check_resize_options
from ..schedule.attachment import Attachment, Resizer, Seen
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import check_int, is_dtensor
from ..utils.ranks import has_process_group
from .context_parts import PartResizer
from .shifted_labels import shifts_labels

_OTHERWISE = "or start a new training from the checkpoint's weights"

_NO_TOKEN = (
    "no token of a step's batches is left after resizing, so the loss of the step is 0 or NaN, and the model learned "
    "nothing: the attention mask of every row is 0 everywhere, or a mode with remainder='drop' left no row"
)

_SHORT = (
    "the training ends at {} of {} tokens: the schedule grows for {:,} {}s, and the training takes {:,}. Pass a "
    "smaller duration, or train longer"
)


class ScheduleState:
    """A trainer's schedule, over one training or several.

    Args:
        scheduler: the schedule to step.
        resize_options: options for `resize_batch`.
        total_tokens: number of tokens after which the training ends; None if it ends otherwise.

    Attributes:
        attachment: the attachment of the current training, or None.
        train_tokens: number of tokens that all ranks have trained on, after resizing and without padding.

    Raises:
        TypeError: `scheduler` is not a SequenceLengthScheduler, `total_tokens` is not an int, or `resize_batch` does
            not have an option.
        ValueError: `total_tokens` is smaller than 1, or an option has a value that no batch can have.
    """

    def __init__(
        self,
        scheduler: SequenceLengthScheduler,
        resize_options: Mapping[str, Any],
        total_tokens: int | None = None,
    ) -> None:
        if not isinstance(scheduler, SequenceLengthScheduler):
            raise TypeError(f"scheduler must be a SequenceLengthScheduler, got {type(scheduler).__name__}")
        check_resize_options(resize_options)
        self.scheduler = scheduler
        self.attachment: Attachment | None = None
        self.train_tokens = 0
        self._total_tokens = None if total_tokens is None else check_int("total_tokens", total_tokens, minimum=1)
        self._options = dict(resize_options)
        self._device = torch.device("cpu")
        self._ranks_of_batch = 1
        self._first_progress: int | None = None
        self._seen = Seen(0, 0)  # counted since the last call of `step`
        self._is_up_to_date = False  # whether everything before this point was counted
        self._has_counted_step = True  # of the last call of `step`
        self._has_warned = False
        self._has_warned_of_short = False

    def attach(
        self, entrance: nn.Module, model: nn.Module, device: torch.device, ranks_of_batch: int = 1
    ) -> Attachment:
        """Resizes the training inputs of `entrance`. Removes the attachment that an interrupted training has left.

        Args:
            entrance: the module to attach to: the model, or another module that all batches pass.
            model: the model. With `ContextParallel`, each rank gets its part of a batch that all ranks of the mesh
                hold, and the batch counts once.
            device: the device on which the ranks exchange their counts.
            ranks_of_batch: number of ranks to which the trainer gives the same batches, as under tensor parallelism.

        Raises:
            ValueError: ranks share the tokens of the model with ContextParallel, and others share its heads, or
                batches are (tokens, rows).
        """
        self.detach()
        sharded = context_mesh_of(model)
        _check_parallelism(model, sharded, ranks_of_batch)
        resizer: Resizer = self.scheduler
        self._ranks_of_batch = max(ranks_of_batch, 1 if sharded is None else sharded.size())
        if sharded is not None:
            resizer = self._part_resizer(model)
        self.attachment = Attachment(entrance, resizer, self._options)
        self._device, self._seen = device, Seen(0, 0)
        self._is_up_to_date = False
        return self.attachment

    def _part_resizer(self, model: nn.Module) -> Resizer:
        from ..parallel.context_batches import ContextBatches  # loads torch.distributed.tensor

        if self._options.get("seq_dim", 1) != 1:
            raise ValueError(f"seq_dim must be 1 under ContextParallel, got {self._options['seq_dim']}")
        shard = ContextBatches(model, shift_labels=shifts_labels(model), keys=self._options.get("keys"))
        return PartResizer(self.scheduler, shard)

    def detach(self) -> None:
        if self.attachment is not None:
            self.attachment.remove()
        self.attachment = None

    def start(self) -> None:
        """Resets the schedule to its progress before the first training, for a training that does not resume."""
        self.scheduler.progress = self._remember_first_progress()
        self.train_tokens = 0

    def resume(self, state_dict: Any) -> None:
        """Loads a state of `state_dict()` from a checkpoint; None if the checkpoint has no such state.

        Raises:
            ValueError: the state is missing or invalid, has another configuration, or has reached `total_tokens`.
                Nothing was changed.
        """
        if state_dict is None:
            raise ValueError(
                "the checkpoint has no state of SequenceLengthWarmup, since it was written without this callback; "
                f"resume without it, {_OTHERWISE}"
            )
        self._remember_first_progress()
        try:
            train_tokens = check_int("train_tokens", state_dict["train_tokens"], minimum=0)
            if self._total_tokens is None or train_tokens < self._total_tokens:
                self.scheduler.load_state_dict(state_dict["scheduler"])
                self.train_tokens = train_tokens
                return
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"the checkpoint's state of SequenceLengthWarmup does not fit: {error}; pass a scheduler of the "
                f"checkpoint's configuration, {_OTHERWISE}"
            ) from error
        raise ValueError(
            f"total_tokens must be more than the {train_tokens} tokens of the checkpoint, got {self._total_tokens}: "
            "its training has ended"
        )

    def step(self, steps: int, *, count: bool = True) -> None:
        """Advances the schedule by optimizer steps that every rank has made.

        Args:
            steps: number of optimizer steps.
            count: if False and nothing depends on the tokens of this step, count them later, without waiting for the
                device and the ranks.
        """
        unit = self.scheduler.unit
        if count or unit != "step":
            self._bring_up_to_date()
        seen, self._seen = self._seen, Seen(0, 0)
        self._has_counted_step = self._is_up_to_date
        self.scheduler.step({"step": steps, "token": seen.tokens, "sample": seen.samples}[unit])

    def begin(self) -> None:
        """Must be called on all ranks before the batches of a step, or before each of them."""
        self._is_up_to_date = False

    def count_tokens(self) -> int:
        """Returns the tokens of all ranks, with those of the current step.

        The first call after a batch exchanges counts, so all ranks must make it.

        Raises:
            ValueError: no training is running.
        """
        if self.attachment is None:
            raise ValueError(
                "count_tokens needs a SequenceLengthWarmup that counts the tokens of a running training: pass the same "
                "object to the trainer"
            )
        self._bring_up_to_date()
        return self.train_tokens

    def is_finished(self) -> bool:
        """Whether the training has reached `total_tokens`, with the current step."""
        if self._total_tokens is None or self.attachment is None:
            return False
        return self.count_tokens() >= self._total_tokens

    def _bring_up_to_date(self) -> None:
        is_new = self.attachment is not None and self.attachment.has_unseen
        if is_new or not self._is_up_to_date:  # the same on all ranks, also if one of them has no batch in a step
            new = self._count()
            self._seen = Seen(self._seen.tokens + new.tokens, self._seen.samples + new.samples)
            self._is_up_to_date = True

    def count_remaining(self) -> None:
        """Counts the tokens of steps that were made with `count=False`."""
        if self.scheduler.unit == "step":
            self._count()

    def _count(self) -> Seen:
        """Returns what all ranks have seen since the last call, and adds it to `train_tokens`."""
        if self.attachment is None:
            return Seen(0, 0)
        seen = self.attachment.take_seen()
        if has_process_group():
            total = torch.tensor(seen, device=self._device)
            torch.distributed.all_reduce(total)
            total //= self._ranks_of_batch
            seen = Seen(*total.tolist())
        self.train_tokens += seen.tokens
        if seen.samples and not seen.tokens and not self._has_warned:
            self._has_warned = True
            warnings.warn(_NO_TOKEN, stacklevel=2)
        return seen

    def warn_of_max_steps(self, steps: int) -> None:
        """Warns at the begin of a training if its schedule needs more optimizer steps than these to the full length."""
        if self.scheduler.unit == "step":
            self._warn_of_short(self.scheduler.progress + steps)

    def warn_of_short_training(self) -> None:
        """Warns at the end of a training that has never reached the full length, once."""
        if not self._has_warned_of_short:
            self._warn_of_short(self.scheduler.progress)

    def _warn_of_short(self, progress: int) -> None:
        scheduler = self.scheduler
        longest = scheduler.max_seq_length
        if not any(length == longest and start <= progress for start, length in scheduler.milestones()):
            self._has_warned_of_short = True
            length, duration = scheduler.seq_length_at(progress), math.ceil(scheduler.duration)
            warnings.warn(_SHORT.format(length, longest, duration, scheduler.unit, progress), stacklevel=3)

    def metrics(self) -> dict[str, int]:
        """Returns the `seq_length` of the last step, and `train_tokens` if the last step was counted."""
        trained_with = None if self.attachment is None else self.attachment.seq_length
        length = {"seq_length": trained_with or self.scheduler.seq_length}
        return {**length, "train_tokens": self.train_tokens} if self._has_counted_step else length

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers and strings."""
        return {"scheduler": self.scheduler.state_dict(), "train_tokens": self.train_tokens}

    def _remember_first_progress(self) -> int:
        if self._first_progress is None:
            self._first_progress = self.scheduler.progress
        return self._first_progress


def context_mesh_of(model: nn.Module) -> Any:
    """The mesh of a model with `ContextParallel`, or None."""
    if not has_process_group():
        return None
    from ..parallel.context_parallel import context_mesh  # loads torch.distributed.tensor

    return context_mesh(model)


def _check_parallelism(model: nn.Module, sharded: Any, ranks_of_batch: int) -> None:
    """Check that the ranks that share tokens are those to which the trainer gives the same batches, if it does so."""
    size = 1 if sharded is None else sharded.size()
    heads = _ranks_of_heads(model)
    if size > 1 and (heads > 1 or ranks_of_batch not in (1, size)):
        raise ValueError(
            f"ranks must share either the tokens or the heads of a model, got ContextParallel on {size} ranks, and "
            f"tensor parallelism on {max(heads, ranks_of_batch)}"
        )


def _ranks_of_heads(model: nn.Module) -> int:
    """The number of ranks that share the heads of ALiBi layers. FSDP2 shards learned slopes too, which say nothing."""
    layers = [module for module in model.modules() if isinstance(module, AlibiHeads) and not module.learned]
    shared: list[Any] = [layer.slopes for layer in layers if is_dtensor(layer.slopes)]
    return max((slopes.device_mesh.size() for slopes in shared), default=1)
