"""What the warmups of Hugging Face and Lightning share: the schedule, its attachment, and the tokens of all ranks."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..models.alibi_layer import AlibiHeads
from ..resizing.options import KEEPING_SHAPE
from ..schedule.attachment import Attachment, Resizer, Seen
from ..schedule.scheduler import SequenceLengthScheduler
from ..utils.checks import is_dtensor
from ..utils.modules import shifts_labels
from ..utils.ranks import has_process_group


class ScheduleState:
    """A trainer's schedule, over one training or several. Callbacks named `SequenceLengthWarmup` derive from it.

    Args:
        scheduler: the schedule to step.
        total_tokens: number of tokens after which the training ends; None if it ends otherwise.
        resize_options: options for `resize_batch`.

    Attributes:
        attachment: the attachment of the current training, or None.
        train_tokens: number of tokens that all ranks have trained on, after resizing and without padding.
    """

    def __init__(
        self, scheduler: SequenceLengthScheduler, *, total_tokens: int | None = None, **resize_options: Any
    ) -> None:
        self.scheduler = scheduler
        self.attachment: Attachment | None = None
        self.train_tokens = 0
        self._total_tokens = total_tokens
        self._options = resize_options
        self._first_progress: int | None = None
        self._has_warned = False
        self._seen, self._is_counted = Seen(0, 0), True

    def _attach(self, called: nn.Module, model: nn.Module, device: torch.device, ranks_of_batch: int = 1) -> None:
        """Resizes the training inputs of `called`. Removes the attachment that an interrupted training has left.

        Args:
            called: the module to attach to: the model, or another module that all batches pass.
            model: the model. With `ContextParallel`, each rank gets its part of a batch that all ranks of the mesh
                hold, and the batch counts once.
            device: the device on which the ranks exchange their counts.
            ranks_of_batch: number of ranks to which the trainer gives the same batches, as under tensor parallelism.
        """
        self.detach()
        sharded = context_mesh_of(model)
        _check_parallelism(model, sharded, ranks_of_batch)
        self._ranks_of_batch = max(ranks_of_batch, 1 if sharded is None else sharded.size())
        resizer: Resizer = self.scheduler if sharded is None else self._part_resizer(model)
        self.attachment = Attachment(called, resizer, self._options, receiver=model)
        self._device, self._has_warned = device, False
        self._seen = Seen(0, 0)  # counted since the last call of `_step`
        self._is_counted = True  # whether all batches are

    def _part_resizer(self, model: nn.Module) -> Resizer:
        from ..parallel.context_batches import ContextBatches  # loads torch.distributed.tensor

        if self._options.get("seq_dim", 1) != 1:
            raise ValueError(f"seq_dim must be 1 under ContextParallel, got {self._options['seq_dim']}")
        if self._options.get("mode") in KEEPING_SHAPE:
            raise ValueError(f"mode={self._options['mode']!r} does not support ContextParallel")
        shard = ContextBatches(model, shift_labels=shifts_labels(model), keys=self._options.get("keys"))
        return _PartResizer(self.scheduler, shard)

    def detach(self) -> None:
        """Stops cutting, as at the end of a training. The next training begins anew."""
        if self.attachment is not None:
            self.attachment.remove()
        self.attachment = None

    def _start(self) -> None:
        """Resets the schedule to its progress before the first training, for a training that does not resume."""
        self.scheduler.progress = self._remember_first_progress()
        self.train_tokens = 0

    def _resume(self, state_dict: Any) -> None:
        """Loads a state of `state_dict()` from a checkpoint, which is None if the checkpoint has none."""
        if state_dict is None:
            raise ValueError("the checkpoint must have a state of SequenceLengthWarmup, got none")
        tokens = state_dict["train_tokens"]
        if self._total_tokens is not None and tokens >= self._total_tokens:
            raise ValueError(
                f"total_tokens must be more than the {tokens} tokens of the checkpoint, got {self._total_tokens}"
            )
        self._remember_first_progress()
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.train_tokens = tokens

    def _remember_first_progress(self) -> int:
        if self._first_progress is None:
            self._first_progress = self.scheduler.progress
        return self._first_progress

    def _begin(self) -> None:
        """Must be called on all ranks before the batches of a step, or before each of them."""
        self._is_counted = False

    def _step(self, steps: int, *, count: bool = True) -> None:
        """Advances the schedule by optimizer steps that every rank has made.

        Without `count`, a schedule by steps counts the tokens later, and does not wait for the device and the ranks.
        """
        unit = self.scheduler.unit
        if count or unit != "step":
            self._count()
        seen, self._seen = self._seen, Seen(0, 0)
        self.scheduler.step({"step": steps, "token": seen.tokens, "sample": seen.samples}[unit])

    def count_tokens(self) -> int:
        """The tokens that all ranks have trained on, with the current step: the `source` of a `TokenLR`.

        The first call after a batch waits for the device and the ranks, so all ranks must make it.
        """
        if self.attachment is None:
            raise ValueError("count_tokens needs a running training with this SequenceLengthWarmup, got none")
        self._count()
        return self.train_tokens

    def _count_remaining(self) -> None:
        """Counts the tokens of steps that were made with `count=False`."""
        if self.attachment is not None:
            self._count()

    def _is_finished(self) -> bool:
        """Whether the training has reached `total_tokens`, with the current step."""
        return self._total_tokens is not None and self.count_tokens() >= self._total_tokens

    def _count(self) -> None:
        """Adds what all ranks have seen, once after each `_begin`: also on a rank that has no batch in this step."""
        if self._is_counted or self.attachment is None:
            return
        tokens, samples = self.attachment.take_seen()
        if has_process_group():
            total = torch.tensor([tokens, samples], device=self._device)
            torch.distributed.all_reduce(total)
            tokens, samples = (total // self._ranks_of_batch).tolist()
        self.train_tokens += tokens
        self._seen = Seen(self._seen.tokens + tokens, self._seen.samples + samples)
        self._is_counted = True

    def _warn_of_short_training(self, steps: int = 0) -> None:
        """Warns, once, of a training that never reaches the full length.

        Args:
            steps: number of optimizer steps to come. What they add to other units than steps is not known.
        """
        scheduler = self.scheduler
        if self._has_warned or (steps and scheduler.unit != "step"):
            return
        progress, longest = scheduler.progress + steps, scheduler.max_seq_length
        if not any(length == longest and start <= progress for start, length in scheduler.milestones()):
            self._has_warned = True
            warnings.warn(
                f"the training ends at {scheduler.seq_length_at(progress)} of {longest} tokens: the schedule grows "
                f"for {math.ceil(scheduler.duration):,} {scheduler.unit}s, and the training takes {progress:,}",
                stacklevel=2,
            )

    def figures(self) -> dict[str, int]:
        """The `seq_length` of the last step for the trainer's logs, and `train_tokens` if the step was counted."""
        trained_with = None if self.attachment is None else self.attachment.seq_length
        length = {"seq_length": trained_with or self.scheduler.seq_length}
        return {**length, "train_tokens": self.train_tokens} if self._is_counted else length

    def state_dict(self) -> dict[str, Any]:
        """The state that a checkpoint keeps, as plain numbers and strings."""
        return {"scheduler": self.scheduler.state_dict(), "train_tokens": self.train_tokens}


class _PartResizer:
    """A `Resizer` that returns parts. The facts it returns are those of whole batches."""

    def __init__(self, scheduler: SequenceLengthScheduler, shard: Callable[[Any], Any]) -> None:
        self._scheduler, self._shard = scheduler, shard

    @property
    def seq_length(self) -> int:
        return self._scheduler.seq_length

    def resize(self, batch: Any, **options: Any) -> Any:
        resized, info = self._scheduler.resize(batch, **options)
        return self._shard(resized), info


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
