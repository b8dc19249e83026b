"""The sequence length at each point of a training."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import get_worker_info

from ..ops.call_kind import is_plain_state
from ..resizing.containers import cut_entries
from ..resizing.functional import resize_batch
from ..utils.caller_warnings import warn_caller
from ..utils.checks import (
    MAX_COUNT,
    check_choice,
    check_int,
    check_real,
    check_same_configuration,
    check_state_entries,
)
from .attachment import Attachment
from .lost_labels import LABEL_CHECKS, NO_LABEL, has_lost_labels_on_host
from .pacing import Pacing, as_pacing, describe, discrete, plain, rises

UNITS = ("step", "token", "sample")

#: Number of intervals in which `milestones` searches for changes: a user's own pacing may rise and fall anywhere.
_CALLABLE_GRID = 65536

#: Batches resized at the first length before a warning says that `step` is not called, or that none was cut. More
#: than a step accumulates.
_BATCHES_BEFORE_WARNING = 500

#: Entry of the state of a user's own pacing: the lengths after 1/17, 2/17, ... 16/17 of the duration.
PACING_LENGTHS, _PACING_PARTS = "pacing_lengths", 17

_STALE_LENGTH = (
    "seq_length is not known in a worker process of a DataLoader: the worker has a copy of the scheduler, which step() "
    "in the training loop does not change. Call scheduler.resize(batch) in the training loop, or "
    "scheduler.attach(model), or let a sampler plan the batches with BatchPlanner(max_length=scheduler). A scheduler "
    "that the worker steps itself must be made, or load its state, in the worker. "
    "scheduler.seq_length_at(scheduler.progress) gives the length at the start of the workers"
)

_COPIED = (
    "the length is still {} after {} batches in a process that has a copy of the scheduler: step() in another process "
    "does not change it. Call scheduler.resize(batch) in the process of the training loop, or scheduler.attach(model), "
    "or call scheduler.step({}) in this process"
)

_NOTHING_CUT = (
    "none of {} batches was cut: their rows or packed sequences are not longer than the current length of {} tokens, "
    "so the schedule changes nothing. Set max_seq_length to the length of the rows, and min_seq_length below it"
)

_NEVER_RESIZED = (
    "step() was called {} times, and no batch has gone through the attached model in training mode: the hook runs in "
    "calls of the attached module, model(batch), and not in model.forward(batch) or other methods, such as the "
    "training_step of a LightningModule. Attach to the module that is called, or call scheduler.resize(batch)"
)


class Milestone(NamedTuple):
    """A change of length: from `progress` units until the next milestone, sequences have `seq_length` tokens."""

    progress: int
    seq_length: int


class SequenceLengthScheduler:
    """Grows the sequence length from `min_seq_length` to `max_seq_length` over `duration` units.

    The length after n units is::

        length(n) = min + step_size · ⌊(max − min) · g(n / duration) / step_size⌋

    clamped to [min, max], and exactly max for n >= duration. Source of the method: C. Li, M. Zhang, Y. He, "The
    Stability-Efficiency Dilemma", NeurIPS 2022, arXiv 2108.06084.

    Args:
        min_seq_length: Tokens in a sequence at the start, at least 1.
        max_seq_length: Tokens in a sequence at the end, at least `min_seq_length`.
        duration: Number of units until the full length: 0 or at least 1, and not a share of the training. With 0, every
            sequence has the full length.
        step_size: Lengths grow in multiples of this number, at least 1.
        pacing: g. "linear", "sine", `root`, `exponential`, `doubling`, `cyclic`, `grow_p2`, `discrete`, or a function
            from x in [0, 1) to [0, 1]. Other results are clamped to [0, 1].
        unit: Unit of duration and progress: "step", "token" or "sample". The scheduler does not count units itself:
            the caller of `step` does. A warning says so if nothing is counted in the first 500 batches, also of those
            after `load_state_dict`, and of those in a process that has a copy of the scheduler.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A number is out of its range, or `unit` or `pacing` is unknown.
    """

    _steps_unseen: int  # since `_unseen` was attached

    def __init__(
        self,
        min_seq_length: int = 8,
        max_seq_length: int = 1024,
        *,
        duration: float,
        step_size: int = 8,
        pacing: str | Pacing | discrete = "linear",
        unit: str = "step",
    ) -> None:
        min_seq_length = check_int("min_seq_length", min_seq_length, minimum=1)
        max_seq_length = check_int("max_seq_length", max_seq_length, minimum=1)
        if max_seq_length < min_seq_length:
            raise ValueError(f"max_seq_length must be at least min_seq_length {min_seq_length}, got {max_seq_length}")
        check_choice("unit", unit, UNITS)
        duration = plain(check_real("duration", duration))
        if duration < 0:
            raise ValueError(f"duration must not be negative, got {duration}")
        if duration > MAX_COUNT:
            raise ValueError(f"duration must be at most {MAX_COUNT}, got {duration}")
        if 0 < duration < 1:
            raise ValueError(
                f"duration must be 0 or at least 1, because it counts units (steps, tokens or samples), got {duration}"
                f"; for a share of the training, as in Composer, write duration={duration} * total_{unit}s"
            )
        step_size = check_int("step_size", step_size, minimum=1)
        self.min_seq_length = min_seq_length
        self.max_seq_length = max_seq_length
        self.duration = duration
        self.step_size = step_size
        self.unit = unit
        self.pacing = as_pacing(pacing)
        if isinstance(self.pacing, discrete):
            self.pacing.check_fits(min_seq_length, max_seq_length, duration)
        self.progress = 0
        self._batches_before_step: int | None = 0  # None as soon as the progress changes, or after the warning
        self._batches_uncut: int | None = 0  # None as soon as a batch is cut, or at the full length
        self._unseen: weakref.ref[Attachment] | None = None  # an attachment until it resizes a batch
        self._label_checks = LABEL_CHECKS

    @property
    def progress(self) -> int:
        """Number of units so far. It can be assigned: an int of 64 bits, at least 0."""
        return self._progress

    @progress.setter
    def progress(self, progress: int) -> None:
        progress = check_int("progress", progress, minimum=0)
        if progress != vars(self).get("_progress"):
            self._batches_before_step = None
        self._progress = progress
        self._process = self._counting_process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_unseen": None}  # attachments belong to this object

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Also take the state of a scheduler that an earlier version pickled, which has `progress` itself."""
        later = dict.fromkeys(("_batches_before_step", "_batches_uncut", "_unseen", "_counting_process"))
        vars(self).update({**later, "_label_checks": LABEL_CHECKS, **state})
        if "progress" in state:
            self.progress = vars(self).pop("progress")

    @property
    def seq_length(self) -> int:
        """Current number of tokens in a sequence.

        Raises:
            RuntimeError: In a worker process of a DataLoader, before the end of the warmup. The worker has a copy of
                the scheduler, which the training loop does not step. There is no error if the scheduler was made,
                stepped or loaded in the worker, or `progress` was assigned there.
                `scheduler.seq_length_at(scheduler.progress)` gives the length at the start of the workers.
        """
        if not torch.compiler.is_compiling() and self._is_stale():  # torch.compile does not trace get_worker_info
            raise RuntimeError(_STALE_LENGTH)
        return self.seq_length_at(self.progress)

    def _is_stale(self) -> bool:
        """Whether this is a copy in a worker process, which the training loop does not step."""
        return get_worker_info() is not None and self._process != os.getpid() and self.progress < self.duration

    def step(self, n: int | None = None) -> int:
        """Count `n` more units (steps, tokens or samples: `unit`) and return the new sequence length.

        Args:
            n: Steps, tokens or samples since the last call. Default: 1 with unit "step". Other units need a number.

        Raises:
            TypeError: `n` is not an int.
            ValueError: `n` is negative, or missing with unit "token" or "sample", or the progress would no longer fit
                into 64 bits. Nothing was counted.
        """
        if n is None and self.unit != "step":
            raise ValueError(
                f"n must be the number of {self.unit}s of the step, because unit is {self.unit!r}, got None"
            )
        units = 1 if n is None else check_int("n", n, minimum=0)
        progress = check_int("progress", self.progress + units)
        seq_length = self.seq_length_at(progress)  # before anything is counted: a pacing of your own may raise
        self.progress = progress
        if self._unseen is not None:
            self._count_unseen()
        return seq_length

    def _count_unseen(self) -> None:
        """Count a step, to warn once if no batch goes through an attached model."""
        assert self._unseen is not None
        attachment = self._unseen()
        if attachment is None or not attachment.is_attached:
            return
        self._steps_unseen += 1
        if self._steps_unseen >= _BATCHES_BEFORE_WARNING:
            self._unseen = None
            warn_caller(_NEVER_RESIZED.format(self._steps_unseen))

    def seq_length_at(self, progress: float) -> int:
        """Number of tokens in a sequence after `progress` units. `progress` is at least 0."""
        progress = check_real("progress", progress)
        if progress < 0:
            raise ValueError(f"progress must not be negative, got {progress}")
        if progress >= self.duration:
            return self.max_seq_length
        if isinstance(self.pacing, discrete):
            return self.pacing.length_at(progress) or self.max_seq_length
        share = self.pacing(Fraction(progress) / Fraction(self.duration))
        if not isinstance(share, Real):
            raise TypeError(f"pacing must return a number, got {type(share).__name__} at progress {progress}")
        if not math.isfinite(share):
            raise ValueError(f"pacing must return a finite number, got {share} at progress {progress}")
        steps = (self.max_seq_length - self.min_seq_length) * share / self.step_size
        if isinstance(steps, float):
            steps *= 1 + 2**-49  # the pacing's rounding must not make a length late
        length = self.min_seq_length + self.step_size * math.floor(steps)
        return max(self.min_seq_length, min(length, self.max_seq_length))

    def milestones(self) -> list[Milestone]:
        """Every change of length, from progress 0 on, at whole numbers of units.

        A pacing of your own is evaluated at 65,537 points, or at every unit if the duration is shorter. If the lengths
        of two neighboring points differ, the changes between the points are found by bisection. A bump that lies
        between two points can be missed.
        """
        points = sorted(self._points_between_changes())
        found = [Milestone(points[0], self.seq_length_at(points[0]))]
        for start, stop in pairwise(points):
            found += self._changes(start, stop, found[-1].seq_length, self.seq_length_at(stop))
        return found

    def _points_between_changes(self) -> set[int]:
        """Points from 0 to the end. Between two of them, lengths either all rise or all fall."""
        end, parts = math.ceil(self.duration), rises(self.pacing)
        if parts is None:
            return {end * index // _CALLABLE_GRID for index in range(_CALLABLE_GRID + 1)}
        starts = {math.ceil(Fraction(self.duration) * index / parts) for index in range(parts + 1)}
        return starts | {max(start - 1, 0) for start in starts}

    def _changes(self, start: int, stop: int, length: int, length_at_stop: int) -> Iterator[Milestone]:
        """The changes in (start, stop], found by bisection."""
        if length == length_at_stop:
            return
        if stop - start == 1:
            yield Milestone(stop, length_at_stop)
            return
        middle = (start + stop) // 2
        length_at_middle = self.seq_length_at(middle)
        yield from self._changes(start, middle, length, length_at_middle)
        yield from self._changes(middle, stop, length_at_middle, length_at_stop)

    def resize(self, batch: Any, **resize_options: Any) -> Any:
        """Call `resize_batch` with the current length.

        Warns once if one of the first 500 batches has labels in host memory, by the names of `resize_batch`, and loses
        all labels of an entry. On another device the check would wait for the device. There an attachment makes the
        check, in `take_seen()`. Nothing is checked while PyTorch traces, or under a dispatch mode such as
        `torch.set_default_device`. Also warns once if none of the first 500 batches was cut before the full length.

        Raises:
            RuntimeError: The current length is not known, see `seq_length`.
        """
        result = resize_batch(batch, self.seq_length, **resize_options)
        if not torch.compiler.is_compiling():  # a graph would be traced again for each count
            self._count_batch()
            if self._label_checks or self._batches_uncut is not None:
                self._check_cut(batch, result[0] if resize_options.get("return_info") else result)
        return result

    def _check_cut(self, batch: Any, resized: Any) -> None:
        """Warn once of lost labels, and once of batches that are not cut."""
        if torch.compiler.is_compiling():  # after a graph break in `resize`
            return
        if self._batches_uncut is not None and is_plain_state():
            self._count_uncut(batch, resized)
        if self._label_checks:
            self._check_labels(batch, resized)

    def _count_uncut(self, batch: Any, resized: Any) -> None:
        """Count a batch, to warn once if none is cut."""
        assert self._batches_uncut is not None
        count, self._batches_uncut = self._batches_uncut + 1, None
        if self.seq_length >= self.max_seq_length or any(cut_entries(batch, resized)):
            return
        if count >= _BATCHES_BEFORE_WARNING:
            warn_caller(_NOTHING_CUT.format(count, self.seq_length))
        else:
            self._batches_uncut = count

    def _check_labels(self, batch: Any, resized: Any) -> None:
        self._label_checks -= 1
        if has_lost_labels_on_host(batch, resized):
            self._label_checks = 0
            warn_caller(NO_LABEL.format(self.seq_length))

    def _count_batch(self) -> None:
        """Count a resized batch, to warn once if `step` is never called."""
        self._unseen = None
        if self._counting_process != os.getpid():  # a copy that was not stepped yet
            self._counting_process, self._batches_before_step = os.getpid(), 0
        if self._batches_before_step is None:
            return
        self._batches_before_step += 1
        if self._batches_before_step >= _BATCHES_BEFORE_WARNING:
            count, self._batches_before_step = self._batches_before_step, None
            if self.seq_length < self.max_seq_length:
                self._warn_of_no_step(count)

    def _warn_of_no_step(self, count: int) -> None:
        number = "" if self.unit == "step" else f"number of {self.unit}s"
        if self._process != os.getpid():
            warn_caller(_COPIED.format(self.seq_length, count, number))
        else:
            warn_caller(
                f"the length is still {self.seq_length} after {count} batches: call scheduler.step({number}) after "
                "each optimizer step"
            )

    def attach(self, model: nn.Module, **resize_options: Any) -> Attachment:
        """Resize the arguments of `model` to the current length before its forward, in training mode only.

        Tensor arguments are resized under the names of the forward's parameters. A batch in one mapping is resized as
        a whole. The sequences of a packed batch are cut one by one, and each is a sample. Set `keys` if the model takes
        other tensors of two dimensions, such as the source of an encoder-decoder or labels of rows. Arguments of a
        forward `(*args)` are named "0", "1", ...; `remainder="pad"` asks for their `pad_values`, since each may hold
        labels.

        The loss must be computed in the forward or from its outputs, because labels outside the model are not resized:
        a loss of every token then fails, but a loss of the last token, or one that broadcasts, gets the labels of other
        tokens. Pass the labels to the model, or call `resize` on the whole batch instead of attaching. A warning says
        so if the first call that is cut gets no labels, by the names of `resize_batch`, and returns no loss, except in
        a model that was compiled in place after attaching.

        Works on DistributedDataParallel, fully_shard, Accelerate and compiled models. Attach last, so that compiling
        does not include the resizing in its graph. `num_items_in_batch`, which Hugging Face's Trainer passes, is scaled
        by the share of the labels that are kept. This is exact if all batches of a step keep the same share. In
        training mode the calls of `generate` are resized too. The caller must still call `step`. A warning says so if
        no batch has gone through the model in the first 500 steps.

        A deep copy of the model, as `torch.optim.swa_utils.AveragedModel` makes, follows this scheduler too, and counts
        its own batches. `remove()` of this attachment also detaches the copy. If you copied the scheduler too, attach
        the copied scheduler to the copied model. It takes the place of this one. A deep copy of the wrapper that
        `torch.compile(model)` returns does not follow if the wrapper itself was attached. If you need copies, attach
        before `torch.compile`, or attach to the module inside.

        A pickled model, also by `torch.save`, does not keep the attachment: attach a scheduler to the loaded model.
        Without one the inputs keep their length. A warning says so once in training mode, except for a model that was
        attached after `model.compile()`.

        Args:
            model: The module that the training loop calls.
            resize_options: For `resize_batch`. `keys` names the tensors to resize if other inputs must pass through.

        Returns:
            The attachment, with `seq_length`, `take_seen()` for the number of tokens and samples, and `remove()`.

        Raises:
            TypeError: `model` is not an nn.Module, or `resize_batch` does not have an option, or `return_info` is one.
            ValueError: `model` itself has an attachment already, or an option has a value that no batch can have, or
                `model` is one of torch's Transformer modules without `batch_first` and `seq_dim` is not 0.
        """
        attachment = Attachment(model, self, resize_options)
        self._unseen, self._steps_unseen = weakref.ref(attachment), 0
        return attachment

    def state_dict(self) -> dict[str, Any]:
        """The progress and the configuration, as plain numbers and strings.

        A pacing of your own is saved as its name and 16 of its lengths: "pacing_lengths", a list of ints.
        """
        state: dict[str, Any] = {"progress": self.progress, **self._configuration()}
        if rises(self.pacing) is None:  # then the name alone does not say which function it is
            shares = range(1, _PACING_PARTS)
            state[PACING_LENGTHS] = [self.seq_length_at(self.duration * share / _PACING_PARTS) for share in shares]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the progress of a scheduler with the same configuration.

        A pacing of your own must have the name and the lengths of the saved one. In a state without "pacing_lengths"
        only the name is compared.

        Raises:
            TypeError: `state_dict` is not a mapping, or its progress is not an int.
            ValueError: Entries are missing, unknown, or of another configuration, or the progress is negative or does
                not fit into 64 bits. Nothing was changed.
        """
        configuration = self.state_dict()
        if isinstance(state_dict, Mapping) and PACING_LENGTHS not in state_dict:
            configuration.pop(PACING_LENGTHS, None)
        check_state_entries(state_dict, configuration)
        del configuration["progress"]
        check_same_configuration({name: state_dict[name] for name in configuration}, configuration)
        self.progress = state_dict["progress"]
        self._batches_before_step = 0

    def _configuration(self) -> dict[str, int | float | str]:
        return {
            "min_seq_length": self.min_seq_length,
            "max_seq_length": self.max_seq_length,
            "duration": self.duration,
            "step_size": self.step_size,
            "pacing": describe(self.pacing),
            "unit": self.unit,
        }

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._configuration().items())
        return f"SequenceLengthScheduler({settings}, progress={self.progress})"
