"""Composer's algorithms SeqLengthWarmup and Alibi, on this package's schedule, operators and surgery."""

from __future__ import annotations

from fractions import Fraction
from weakref import WeakSet

from composer.core import Algorithm, Event, State, TimeUnit
from composer.loggers import Logger
from torch import nn

from ...resizing.functional import resize_batch
from ...schedule.scheduler import SequenceLengthScheduler
from ...utils.checks import check_bool, check_int, check_real
from .functional import apply_alibi, rows_and_length, set_batch_sequence_length
from .memory import claim_memory

#: Checkpoints name the classes by this path, wherever the file lies.
_PUBLIC_MODULE = "seqwarm_kernels.trainers.composer"


class SeqLengthWarmup(Algorithm):
    """Composer's SeqLengthWarmup on `SequenceLengthScheduler`: the same arguments, events and metrics.

    The length follows from the trainer's timestamp and max_duration alone, so that a resumed run goes on as it would
    have. It is measured in what max_duration counts: batches (for epochs, too), or samples or tokens, which Composer
    counts before anything is cut. From `duration` of the training on it is exactly `max_seq_length`. Evaluation is not
    touched.

    Before the first batch on a CUDA device the model is passed once at full length, so that its memory is claimed, and
    put back bit for bit (`warmup_allocator`). With automatic microbatches this finds their size. Left out under FSDP,
    and for batches that are no mappings.

    It works behind an `Alibi` in either order of the trainer's algorithms: rows are cut by Alibi first, and their
    length is min(the warmup's, train_sequence_length_scaling · S). For a ramp to full rows, `max_seq_length` is to be
    that product.

    Args:
        duration: share of the training until the full length, in [0, 1].
        min_seq_length: tokens in a row at the start.
        max_seq_length: tokens in a row in the end.
        step_size: lengths grow in multiples of this.
        truncate: drop what is behind the length; if False, cut it into further rows.
        preserve_end_of_sequence: with `truncate`, keep each row's last valid token. Needs an "attention_mask".

    Raises:
        TypeError, ValueError: an argument does not fit; at the first batch, max_duration is counted in seconds or
            iterations, or in epochs of a dataloader without a length.
    """

    def __init__(
        self,
        duration: float = 0.3,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        step_size: int = 8,
        truncate: bool = True,
        preserve_end_of_sequence: bool = False,
    ) -> None:
        check_real("duration", duration)
        if not 0 <= duration <= 1:
            raise ValueError(f"duration must be a share of the training, from 0 to 1, got {duration}")
        check_bool("truncate", truncate)
        check_bool("preserve_end_of_sequence", preserve_end_of_sequence)
        SequenceLengthScheduler(min_seq_length, max_seq_length, duration=0, step_size=step_size)  # checks them
        self.duration = duration
        self.min_seq_length = min_seq_length
        self.max_seq_length = max_seq_length
        self.step_size = step_size
        self.truncate = truncate
        self.preserve_end_of_sequence = preserve_end_of_sequence
        self._memory_is_claimed = False

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.AFTER_DATALOADER)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self._memory_is_claimed = False
            self._move_behind_alibi(state)
            return
        if not self._memory_is_claimed:
            self._memory_is_claimed = True
            if state.device.name == "gpu" and not state.fsdp_enabled:
                claim_memory(state, set_batch_sequence_length(state.batch, self.max_seq_length, self.truncate))
        length = self._length_now(state)
        state.batch = set_batch_sequence_length(state.batch, length, self.truncate, self.preserve_end_of_sequence)
        rows, _ = rows_and_length(state.batch)
        logger.log_metrics({"seq_length_warmup/curr_seq_len": length, "seq_length_warmup/curr_bs": rows})

    def _length_now(self, state: State) -> int:
        """In whole numbers: 0.1 of 30 batches are 3, where floating-point numbers make it a little more."""
        done, total = _progress(state)
        share = Fraction(self.duration).limit_denominator(10**9)
        scheduler = SequenceLengthScheduler(
            self.min_seq_length, self.max_seq_length, duration=share.numerator * total, step_size=self.step_size
        )
        return scheduler.seq_length_at(share.denominator * done)

    def _move_behind_alibi(self, state: State) -> None:
        """Composer runs a list of algorithms backwards after the dataloader."""
        others = [algorithm for algorithm in state.algorithms if algorithm is not self]
        first = next((place for place, other in enumerate(others) if isinstance(other, Alibi)), len(others))
        if first < state.algorithms.index(self):
            state.algorithms = [*others[:first], self, *others[first:]]


def _progress(state: State) -> tuple[int, int]:
    """How much of the training is done, and how much there is: epochs in batches, all else in its own unit."""
    limit, now = state.max_duration, state.timestamp
    if limit is None:
        raise ValueError("SeqLengthWarmup needs the trainer's max_duration, got None")
    if limit.unit in (TimeUnit.BATCH, TimeUnit.SAMPLE, TimeUnit.TOKEN):
        return now.get(limit.unit).value, limit.value
    if limit.unit != TimeUnit.EPOCH:
        raise ValueError(
            f"SeqLengthWarmup needs a max_duration in epochs, batches, samples or tokens, got {limit.to_timestring()}"
        )
    if state.dataloader_len is None:
        raise ValueError(
            f"SeqLengthWarmup needs a dataloader with a length where max_duration is in epochs, {limit.to_timestring()}"
            "; give max_duration in batches, samples or tokens"
        )
    batches = state.dataloader_len.value
    return now.epoch.value * batches + min(now.batch_in_epoch.value, batches), limit.value * batches


class Alibi(Algorithm):
    """Composer's Alibi on this package's surgery and attention: the same arguments and events.

    At the start the model's position embeddings give way to ALiBi. Each training batch (B, S) is cut into (B / scaling,
    S · scaling), row by row; evaluation sees full rows.

    Args:
        max_sequence_length: the longest sequence of training and evaluation.
        train_sequence_length_scaling: 1 / k for a whole number k: each row is cut into k. 1 leaves batches as they are.

    Raises:
        TypeError, ValueError: an argument does not fit; at the start, nothing in the model can be replaced; at a batch,
            the length of its rows is no multiple of k.
    """

    def __init__(self, max_sequence_length: int, train_sequence_length_scaling: float = 0.25) -> None:
        check_int("max_sequence_length", max_sequence_length, minimum=1)
        check_real("train_sequence_length_scaling", train_sequence_length_scaling)
        if not 0 < train_sequence_length_scaling <= 1:
            raise ValueError(f"train_sequence_length_scaling must be in (0, 1], got {train_sequence_length_scaling}")
        self._parts = round(1 / train_sequence_length_scaling)
        if abs(self._parts * train_sequence_length_scaling - 1) > 1e-3:  # 0.333 is meant as a third
            raise ValueError(
                f"train_sequence_length_scaling must be 1 / k for a whole number k, got {train_sequence_length_scaling}"
            )
        self.max_sequence_length = max_sequence_length
        self.train_sequence_length_scaling = train_sequence_length_scaling
        self._changed: WeakSet[nn.Module] = WeakSet()

    def __repr__(self) -> str:
        """Composer, loading a checkpoint, evaluates "algorithms." and this, to add an Alibi that the trainer lacks. It
        would add its own on top of this one, if this did not evaluate to the class it stands for."""
        return (
            f"Alibi and __import__({_PUBLIC_MODULE!r}, fromlist=['Alibi']).Alibi("
            f"max_sequence_length={self.max_sequence_length}, "
            f"train_sequence_length_scaling={self.train_sequence_length_scaling})"
        )

    @staticmethod
    def required_on_load() -> bool:
        return True

    def match(self, event: Event, state: State) -> bool:
        return (event == Event.INIT and state.model not in self._changed) or event == Event.AFTER_DATALOADER

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            apply_alibi(state.model, self.max_sequence_length, optimizers=state.optimizers)
            self._changed.add(state.model)
        elif self._parts > 1:
            state.batch = self._cut(state.batch)

    def _cut(self, batch: object) -> object:
        _, length = rows_and_length(batch)
        if length == 0 or length % self._parts:
            raise ValueError(
                f"train_sequence_length_scaling {self.train_sequence_length_scaling} cuts each row into {self._parts}, "
                f"so the length of rows must be a multiple of {self._parts}, got {length}"
            )
        return resize_batch(batch, length // self._parts, mode="reshape", copy=False)
