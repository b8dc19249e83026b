"""The sequence length at each point of a training: a formula, a counter and its state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.utils.data import get_worker_info

from ..resizing.functional import resize_batch
from ..utils.checks import (
    MAX_COUNT,
    check_choice,
    check_int,
    check_real,
    check_same_configuration,
    check_state_entries,
)
from .attachment import Attachment
from .milestones import Milestone, find_milestones
from .pacing import Pacing, as_function, describe, discrete, rises
from .watch import ScheduleListener, ScheduleWatch

UNITS = ("step", "token", "sample")

#: Points at which the state describes a pacing of your own: 1/17, 2/17, ... 16/17 of the duration.
_PACING_PARTS = 17


class SequenceLengthScheduler:
    """Grows the sequence length from `min_seq_length` to `max_seq_length` over `duration` units.

    The length after n units is::

        length(n) = min + step_size · ⌊(max − min) · g(n / duration) / step_size⌋

    clamped to [min, max], and exactly max for n >= duration. Source of the method: C. Li, M. Zhang, Y. He, "The
    Stability-Efficiency Dilemma", NeurIPS 2022, arXiv 2108.06084.

    Args:
        min_seq_length: Tokens in a sequence at the start, at least 1.
        max_seq_length: Tokens in a sequence at the end, at least `min_seq_length`.
        duration: Number of units until the full length: 0 or at least 1. A fraction of the training is not accepted.
            With 0, every sequence has the full length.
        step_size: Lengths grow in multiples of this number, at least 1.
        pacing: g. "linear", "sine", `root`, `exponential`, `doubling`, `cyclic`, `grow_p2`, `discrete`, or a function
            from x in [0, 1) to [0, 1]. Other results are clamped to [0, 1].
        unit: Unit of duration and progress: "step", "token" or "sample". The caller of `step` counts them. Samples are
            rows as they are trained on: `mode="reshape"` makes several of one.

    Attributes:
        listeners: Objects that are notified of each step and each resized batch, with the methods of
            `ScheduleListener` in `schedule.watch`. At first one `ScheduleWatch`, which warns once if the
            schedule has no effect.

    Raises:
        TypeError, ValueError: An argument has the wrong type or is out of its range.
    """

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
        self.min_seq_length = check_int("min_seq_length", min_seq_length, minimum=1)
        self.max_seq_length = check_int("max_seq_length", max_seq_length, minimum=self.min_seq_length)
        self.duration = check_real("duration", duration)
        if not (self.duration == 0 or 1 <= self.duration <= MAX_COUNT):  # a fraction would end the warmup at once
            raise ValueError(f"duration must be 0 or a number of {unit}s from 1 to 2**53, got {duration}")
        self.step_size = check_int("step_size", step_size, minimum=1)
        check_choice("unit", unit, UNITS)
        self.unit = unit
        self.pacing = pacing if isinstance(pacing, discrete) else as_function(pacing)
        if isinstance(pacing, discrete):
            pacing.check_fits(self.min_seq_length, self.max_seq_length, self.duration)
        self.listeners: list[ScheduleListener] = [ScheduleWatch()]
        self._set_progress(0)

    @property
    def progress(self) -> int:
        """Number of units so far. It can be assigned: an int of 64 bits, at least 0."""
        return self._progress

    @progress.setter
    def progress(self, progress: int) -> None:
        self._set_progress(progress)
        for listener in [*self.listeners]:
            listener.on_step(self)

    def _set_progress(self, progress: int) -> None:
        progress = check_int("progress", progress, minimum=0)
        self._seq_length = self.seq_length_at(progress)  # first: a pacing of your own may raise
        self._progress = progress

    @property
    def seq_length(self) -> int:
        """Current number of tokens in a sequence.

        Raises:
            RuntimeError: In a worker process of a DataLoader, whose copy of the scheduler never advances. A worker with
                a schedule of its own asks `seq_length_at`.
        """
        if not torch.compiler.is_compiling() and get_worker_info() is not None:  # torch.compile cannot trace the latter
            raise RuntimeError(
                "seq_length is not known in a DataLoader worker, whose copy of the scheduler stays behind"
            )
        return self._seq_length

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
            raise ValueError(f"n must be the number of {self.unit}s of the step, got None")
        self.progress += 1 if n is None else check_int("n", n, minimum=0)
        return self._seq_length

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
            steps *= 1 + 2**-49  # compensates for rounding in the pacing
        length = self.min_seq_length + self.step_size * math.floor(steps)
        return max(self.min_seq_length, min(length, self.max_seq_length))

    def milestones(self) -> list[Milestone]:
        """Every change of length, from progress 0 on, at whole numbers of units, see `find_milestones`."""
        return find_milestones(self.seq_length_at, self.duration, rises(self.pacing))

    def resize(self, batch: Any, **resize_options: Any) -> Any:
        """Call `resize_batch` with the current length.

        Raises:
            RuntimeError: In a worker process of a DataLoader, see `seq_length`.
        """
        if resize_options.get("mode") == "segments":
            resize_options.setdefault("lengths", (self.min_seq_length, self.max_seq_length))
        resized = resize_batch(batch, self.seq_length, **resize_options)
        if self.listeners and not torch.compiler.is_compiling():  # a graph would be traced again for each count
            new_batch = resized[0] if resize_options.get("return_info") else resized
            for listener in [*self.listeners]:
                listener.on_resize(self, batch, new_batch)
        return resized

    def attach(self, model: nn.Module, **resize_options: Any) -> Attachment:
        """Resize the arguments of `model` to the current length before its forward.

        Resizes in training mode with gradients enabled, so a validation under `torch.no_grad()` keeps the full length.
        A batch in one mapping is resized as a whole; other tensor arguments have the names of the forward's parameters,
        or "0", "1", ... in a forward `(*args)`. Labels outside of the model are not resized: pass them to it, or call
        `resize` on the whole batch instead of attaching. The caller must still call `step`.

        Works on DistributedDataParallel, fully_shard, Accelerate and compiled models. Attach last, so that compiling
        does not include the resizing in its graph. Copies and pickles of the model are not attached: attach again. In
        Hugging Face's Trainer use `trainers.huggingface.SequenceLengthWarmup`.

        Args:
            model: The module that the training loop calls.
            resize_options: For `resize_batch`. `keys` names the tensors to resize if others must pass through, such as
                the source of an encoder-decoder, or labels of rows.

        Returns:
            The attachment, with `seq_length`, `take_seen()` for the number of tokens and samples, and `remove()`.

        Raises:
            TypeError: `model` is not an nn.Module, or `resize_batch` does not have an option, or `return_info` is one.
            ValueError: `model` itself has an attachment already, or layers with `parallel.ContextParallel`, or an
                option has a value that no batch can have, or `model` is one of torch's Transformer modules without
                `batch_first` and `seq_dim` is not 0, or `model` takes neither segments nor a window. In training, a
                model of transformers in `model` raises if it does not get them.
        """
        attachment = Attachment(model, self, resize_options)
        for listener in [*self.listeners]:
            listener.on_attach(self)
        return attachment

    def state_dict(self) -> dict[str, Any]:
        """The progress and the configuration, as plain numbers and strings.

        A pacing of your own is saved as its name and the lengths at 16 points, to detect a changed function.
        """
        state = {"progress": self.progress, **self._configuration()}
        if rises(self.pacing) is None:  # its name does not say which function it is
            parts = range(1, _PACING_PARTS)
            state["pacing_lengths"] = [self.seq_length_at(self.duration * part / _PACING_PARTS) for part in parts]
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the progress of a scheduler with the same configuration.

        Raises:
            TypeError: `state_dict` is not a mapping, or its progress is not an int.
            ValueError: Entries are missing, unknown, or of another configuration, or the progress is negative or does
                not fit into 64 bits. Nothing was changed.
        """
        configuration = self.state_dict()
        check_state_entries(state_dict, configuration)
        del configuration["progress"]
        check_same_configuration({name: state_dict[name] for name in configuration}, configuration)
        self._set_progress(state_dict["progress"])

    def _configuration(self) -> dict[str, Any]:
        names = ("min_seq_length", "max_seq_length", "duration", "step_size", "unit")
        return {**{name: getattr(self, name) for name in names}, "pacing": describe(self.pacing)}

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._configuration().items())
        return f"SequenceLengthScheduler({settings}, progress={self.progress})"
