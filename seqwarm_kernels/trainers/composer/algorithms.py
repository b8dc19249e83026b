"""Composer's algorithms SeqLengthWarmup and Alibi, on this package's schedule and operators."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any
from weakref import WeakSet

import torch
from composer.core import Algorithm, Event, Precision, State, TimeUnit
from composer.loggers import Logger
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...allocator.warmup import warmup_allocator
from ...resizing.functional import resize_batch
from ...resizing.model_resizing import ModelResizing
from ...resizing.options import KEEPING_SHAPE
from ...schedule.scheduler import SequenceLengthScheduler
from ...schedule.watch import ScheduleListener, ScheduleWatch
from ...utils.checks import check_choice, check_int, check_real
from ...utils.modules import unwrapped
from ..schedule_state import context_mesh_of
from .context_shards import ContextShards
from .functional import apply_alibi, is_packed, pass_to_transformers, rows_and_length, set_batch_sequence_length

#: Checkpoints name `Alibi` by this path, which does not change if the file moves.
_PUBLIC_MODULE = "seqwarm_kernels.trainers.composer"

_AUTOCAST_DTYPES = {
    Precision.AMP_FP16: torch.float16,
    Precision.AMP_BF16: torch.bfloat16,
    Precision.AMP_FP8: torch.bfloat16,  # for the operators that fp8 does not cover
}


class SeqLengthWarmup(Algorithm):
    """Composer's SeqLengthWarmup on `SequenceLengthScheduler`: the same arguments, events and metrics.

    The length depends only on the trainer's timestamp and max_duration. Progress is measured in the unit of
    max_duration: in samples or tokens, which Composer counts before rows are cut, or else in batches (for epochs, too).
    Evaluation keeps the full length.

    Before the first batch on a CUDA device, the model runs once at full length to claim its memory, and is restored bit
    for bit (see `warmup_allocator`). With automatic microbatching, this run finds the microbatch size. It is skipped
    under FSDP, and for batches that are packed or not mappings.

    `SeqLengthWarmup` runs after `Alibi`, in either order of the trainer's algorithms, on rows that `Alibi` has cut to
    train_sequence_length_scaling · S tokens.

    Args:
        duration: share of the training after which the full length is reached, in [0, 1].
        min_seq_length: tokens in a row at the start.
        max_seq_length: tokens in a row at the end.
        step_size: lengths grow in multiples of this number.
        truncate, preserve_end_of_sequence: as for `set_batch_sequence_length`.
        mode: "segments" or "window" of `resize_batch` instead, which keep the shape of batches.
        boundaries: as for `resize_batch`. Default: the model of transformers in the trainer's model reads position ids,
            which is tested when training begins.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is out of range; when training begins, the model takes neither segments nor a window, or
            a model with ContextParallel has training metrics or device_train_microbatch_size="auto"; at the first
            batch, max_duration does not say how far it has come.
    """

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
        mode: str | None = None,
        boundaries: str | None = None,
    ) -> None:
        if mode is not None:
            check_choice("mode", mode, KEEPING_SHAPE)
        duration = check_real("duration", duration)
        if not 0 <= duration <= 1:
            raise ValueError(f"duration must be a share of the training, from 0 to 1, got {duration}")
        scheduler = SequenceLengthScheduler(min_seq_length, max_seq_length, duration=0, step_size=step_size)
        self.duration = duration
        self.min_seq_length = scheduler.min_seq_length  # checked, as plain ints
        self.max_seq_length = scheduler.max_seq_length
        self.step_size = scheduler.step_size
        self.truncate = truncate
        self.preserve_end_of_sequence = preserve_end_of_sequence
        self._mode, self._boundaries = mode, boundaries
        self._resizing: ModelResizing | None = None  # of the training's model, without `truncate`
        self._numbers: dict[str, Any] = {}  # added to microbatches; Composer counts the rows of batches of tensors only
        self.num_valid_tokens: Tensor | None = None  # of a batch whose mask has left it
        self._memory_is_claimed = False
        self.seq_length = min_seq_length
        self.listeners: list[ScheduleListener] = [ScheduleWatch()]
        self._shards: ContextShards | None = None

    def match(self, event: Event, state: State) -> bool:
        if event in (Event.BEFORE_FORWARD, Event.BATCH_END):
            return self._shards is not None or (event == Event.BEFORE_FORWARD and bool(self._numbers))
        return event in (Event.INIT, Event.FIT_START, Event.AFTER_DATALOADER)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self._memory_is_claimed = False
            self._move_before_alibi(state)
        elif event == Event.FIT_START:
            self._shards = None if context_mesh_of(state.model) is None else ContextShards(state)
            if self._mode is not None:
                if self._shards is not None:
                    raise ValueError(f"mode={self._mode!r} does not support ContextParallel")
                pass_to_transformers(state.model, ("window",))
                options = {"mode": self._mode, "boundaries": self._boundaries}
                self._resizing = ModelResizing(state.model, options, by_rows=True)
        elif event == Event.AFTER_DATALOADER:
            self._resize(state, logger)
        elif event == Event.BEFORE_FORWARD:
            if self._shards is None:
                state.batch = {**state.batch, **self._numbers}
            else:
                state.batch = self._shards.shard(state.batch)
        elif self._shards is not None:
            self._shards.count_once(state)

    def _resize(self, state: State, logger: Logger) -> None:
        if not self._memory_is_claimed:
            self._memory_is_claimed = True
            if state.device.name == "gpu" and not state.fsdp_enabled:
                longest, options = state.batch, None
                if self._resizing is None:
                    longest = set_batch_sequence_length(longest, self.max_seq_length, self.truncate)
                else:
                    options = self._resizing.options
                claim_memory(state, longest, None if self._shards is None else self._shards.shard, options)
        length = self._current_length(state)
        whole = state.batch
        if self._resizing is not None:
            resized, info = resize_batch(whole, length, return_info=True, **self._resizing.options)
            self.num_valid_tokens = info.num_valid_tokens
            state.batch = self._resizing.strip(resized, whole)
            added = {*state.batch} - {*whole}
            self._numbers = {name: state.batch.pop(name) for name in added if not isinstance(state.batch[name], Tensor)}
        else:
            state.batch = set_batch_sequence_length(whole, length, self.truncate, self.preserve_end_of_sequence)
        self.seq_length = length
        for listener in [*self.listeners]:
            listener.on_resize(self, whole, state.batch)
            listener.on_step(self)
        rows, _ = rows_and_length(state.batch)
        logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": rows})

    def _current_length(self, state: State) -> int:
        """Computed in integers: 0.1 of 30 batches are 3, while floating-point numbers give slightly more."""
        done, total = _progress(state)
        share = Fraction(self.duration).limit_denominator(10**9)
        scheduler = SequenceLengthScheduler(
            self.min_seq_length, self.max_seq_length, duration=share.numerator * total, step_size=self.step_size
        )
        return scheduler.seq_length_at(share.denominator * done)

    def _move_before_alibi(self, state: State) -> None:
        """Composer runs the list in reverse order on AFTER_DATALOADER, so this position runs after Alibi."""
        others = [algorithm for algorithm in state.algorithms if algorithm is not self]
        if len(others) == len(state.algorithms):  # the caller runs this algorithm, not the trainer
            return
        first = next((index for index, other in enumerate(others) if isinstance(other, Alibi)), len(others))
        if first < state.algorithms.index(self):
            state.algorithms = [*others[:first], self, *others[first:]]


def _progress(state: State) -> tuple[int, int]:
    """Returns how much of the training is done, and its total: epochs in batches, other durations in their own unit."""
    limit, now = state.max_duration, state.timestamp
    assert limit is not None  # Composer's `fit` needs it
    if limit.unit in (TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN):
        return now.get(limit.unit).value, limit.value
    if limit.unit != TimeUnit.EPOCH or state.dataloader_len is None:
        raise ValueError(
            "max_duration must be in batches, samples or tokens, or in epochs of a dataloader with a length, got "
            f"{limit.to_timestring()}"
        )
    batches = state.dataloader_len.value
    return now.epoch.value * batches + min(now.batch_in_epoch.value, batches), limit.value * batches


def claim_memory(
    state: State,
    batch: Any,
    shard_batch: Callable[[Any], Any] | None = None,
    resize_options: Mapping[str, Any] | None = None,
) -> None:
    """Runs the model once with a microbatch of `batch`, or this rank's part of it, and restores everything.

    With automatic microbatching, the microbatch size is halved until the microbatch fits.
    """
    if not isinstance(batch, Mapping) or is_packed(batch):
        return
    rows, length = rows_and_length(batch)
    if state.device_train_microbatch_size is not None:
        rows = min(rows, math.ceil(state.device_train_microbatch_size))
    model = unwrapped(state.model)

    def loss_of(outputs: Any, inputs: Any) -> Tensor:
        losses = tree_leaves(model.loss(outputs, inputs))  # type: ignore[operator]
        return torch.stack([loss.mean() for loss in losses]).sum()

    while True:
        report = warmup_allocator(
            state.model,
            length,
            batch_size=rows,
            example_batch=batch,
            loss_fn=loss_of,
            autocast_dtype=_AUTOCAST_DTYPES.get(state.precision),
            shard_batch=shard_batch,
            resize_options=resize_options,
        )
        if report.out_of_memory is None:
            return
        problem = f"SeqLengthWarmup: {rows} rows of {length} tokens do not fit ({report.out_of_memory.message})"
        if rows == 1 or not state.auto_microbatching:
            raise torch.OutOfMemoryError(f"{problem}; lower device_train_microbatch_size or max_seq_length")
        rows = state.device_train_microbatch_size = rows // 2
        warnings.warn(f"{problem}; device_train_microbatch_size is {rows} now", stacklevel=2)


class Alibi(Algorithm):
    """Composer's Alibi on this package's `apply_alibi` and attention: the same arguments and events.

    At the start of the training, ALiBi replaces the model's position embeddings. A model that has ALiBi keeps it, and
    only its maximum length changes. Each training batch (B, S) is cut into (B / scaling, S · scaling), row by row.
    Evaluation keeps full rows.

    Args:
        max_sequence_length: length of the longest sequence in training and evaluation.
        train_sequence_length_scaling: 1 / k for an integer k: each row is cut into k rows. 1 keeps batches unchanged.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is out of range.
        ValueError: at the start, the model has nothing to replace; at a batch, the length of its rows is not a multiple
            of k, or the batch is packed.
    """

    def __init__(self, max_sequence_length: int, train_sequence_length_scaling: float = 0.25) -> None:
        self.max_sequence_length = check_int("max_sequence_length", max_sequence_length, minimum=2)
        train_sequence_length_scaling = check_real("train_sequence_length_scaling", train_sequence_length_scaling)
        if not 0 < train_sequence_length_scaling <= 1:
            raise ValueError(f"train_sequence_length_scaling must be in (0, 1], got {train_sequence_length_scaling}")
        self._parts = round(1 / train_sequence_length_scaling)
        if abs(self._parts * train_sequence_length_scaling - 1) > 1e-3:  # 0.333 is accepted as a third
            raise ValueError(
                f"train_sequence_length_scaling must be 1 / k for an integer k, got {train_sequence_length_scaling}"
            )
        self.train_sequence_length_scaling = train_sequence_length_scaling
        self._converted: WeakSet[nn.Module] = WeakSet()

    def __repr__(self) -> str:
        """An expression that evaluates to an Alibi of this class.

        To add an Alibi that the checkpoint has and the trainer lacks, Composer evaluates "algorithms." followed by this
        string. Without the second operand of `and`, Composer would add its own Alibi on top of this one.
        """
        return (
            f"Alibi and __import__({_PUBLIC_MODULE!r}, fromlist=['Alibi']).Alibi("
            f"max_sequence_length={self.max_sequence_length}, "
            f"train_sequence_length_scaling={self.train_sequence_length_scaling})"
        )

    @staticmethod
    def required_on_load() -> bool:
        return True

    def match(self, event: Event, state: State) -> bool:
        return (event == Event.INIT and state.model not in self._converted) or event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            apply_alibi(state.model, self.max_sequence_length, optimizers=state.optimizers)
            self._converted.add(state.model)
        elif self._parts > 1:
            state.batch = self._cut(state.batch)

    def _cut(self, batch: object) -> object:
        if is_packed(batch):
            raise ValueError(
                f"train_sequence_length_scaling must be 1 for packed batches, got {self.train_sequence_length_scaling}"
            )
        _, length = rows_and_length(batch)
        if length == 0 or length % self._parts:
            raise ValueError(
                f"rows must have a length that is a multiple of {self._parts} (1 / train_sequence_length_scaling), "
                f"got {length}"
            )
        return resize_batch(batch, length // self._parts, mode="reshape", copy=False)
