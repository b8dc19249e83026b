"""When: how long sequences are now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn

from ..resizing.functional import resize_batch
from ..utils.checks import check_int, check_real, check_same_configuration, check_state_entries
from .attachment import Attachment

UNITS = ("step", "token", "sample")

#: A pacing of the user's own may rise and fall anywhere; its milestones are looked for between so many points.
_CALLABLE_GRID = 65536

#: x in [0, 1), an exact fraction of the warmup's duration -> the share of the way to the full length, 0 to 1.
Pacing = Callable[[Fraction], "float | Fraction"]


def linear(x: Fraction) -> Fraction:
    """g(x) = x."""
    return x


class root:
    """g(x) = x^(1 / degree), degree > 0: above 1, lengths grow fast at first; root(1) is linear."""

    def __init__(self, degree: float) -> None:
        check_real("degree", degree)
        if degree <= 0:
            raise ValueError(f"degree must be positive, got {degree}")
        self.degree = degree

    def __call__(self, x: Fraction) -> float:
        return float(x) ** (1 / self.degree)

    def __repr__(self) -> str:
        return f"root({self.degree})"


class discrete:
    """Stages (units, length), one after another and taken as given; after the last one the full length.

    Lengths must not fall, and need not be multiples of a step size.
    """

    def __init__(self, stages: Iterable[tuple[int, int]]) -> None:
        self.stages = [(units, length) for units, length in stages]
        for units, length in self.stages:
            check_int("units of a stage", units, minimum=1)
            check_int("length of a stage", length, minimum=1)
        lengths = [length for _, length in self.stages]
        if any(before > after for before, after in pairwise(lengths)):
            raise ValueError(f"the lengths of stages must not fall, got {lengths}; a pacing of your own may")

    def length_at(self, progress: float) -> int | None:
        """The length of the stage that `progress` lies in, None behind the last one."""
        end = 0
        for units, length in self.stages:
            end += units
            if progress < end:
                return length
        return None

    def check_fits(self, min_seq_length: int, max_seq_length: int, duration: float) -> None:
        total = sum(units for units, _ in self.stages)
        if total > duration:
            raise ValueError(f"duration must cover the stages of pacing, {total} units, got {duration}")
        for _, length in self.stages:
            if not min_seq_length <= length <= max_seq_length:
                raise ValueError(
                    f"pacing must keep to lengths from min_seq_length {min_seq_length} to max_seq_length "
                    f"{max_seq_length}, got a stage of {length}"
                )

    def __repr__(self) -> str:
        return f"discrete({self.stages})"


class Milestone(NamedTuple):
    """From `progress` units on, until the next milestone, sequences have `seq_length` tokens."""

    progress: int
    seq_length: int


class SequenceLengthScheduler:
    """Grows the sequence length from `min_seq_length` to `max_seq_length` over `duration` units.

        length(n) = min + step_size · ⌊(max − min) · g(n / duration) / step_size⌋

    never below min nor above max, and exactly max from n = duration on; with duration 0 from the start.
    Source of the method: C. Li, M. Zhang, Y. He, "The Stability-Efficiency Dilemma", NeurIPS 2022,
    arXiv 2108.06084.

    Args:
        min_seq_length: tokens in a sequence at the start, at least 1.
        max_seq_length: tokens in a sequence in the end, at least `min_seq_length`.
        duration: units until the full length, at least 0.
        step_size: lengths grow in multiples of this, at least 1.
        pacing: g. "linear", `root(degree)`, `discrete([(units, length), ...])`, or a function from x in [0, 1)
            to [0, 1] (clamped to it).
        unit: what duration and progress count: "step", "token" or "sample". A label: the caller of `step`
            counts them.
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
        check_int("min_seq_length", min_seq_length, minimum=1)
        check_int("max_seq_length", max_seq_length, minimum=1)
        if max_seq_length < min_seq_length:
            raise ValueError(f"max_seq_length must be at least min_seq_length {min_seq_length}, got {max_seq_length}")
        check_real("duration", duration)
        if duration < 0:
            raise ValueError(f"duration must not be negative, got {duration}")
        check_int("step_size", step_size, minimum=1)
        if unit not in UNITS:
            raise ValueError(f"unit must be one of {', '.join(UNITS)}, got {unit!r}")
        self.min_seq_length = min_seq_length
        self.max_seq_length = max_seq_length
        self.duration = duration
        self.step_size = step_size
        self.unit = unit
        self.pacing = _as_pacing(pacing)
        if isinstance(self.pacing, discrete):
            self.pacing.check_fits(min_seq_length, max_seq_length, duration)
        self.progress = 0

    @property
    def seq_length(self) -> int:
        """Tokens in a sequence now."""
        return self.seq_length_at(self.progress)

    def step(self, n: int = 1) -> int:
        """Count `n` more units (steps, tokens or samples: `unit`); return the sequence length from now on."""
        check_int("n", n, minimum=0)
        self.progress += n
        return self.seq_length

    def seq_length_at(self, progress: float) -> int:
        """Tokens in a sequence after `progress` units, at least 0."""
        check_real("progress", progress)
        if progress < 0:
            raise ValueError(f"progress must not be negative, got {progress}")
        if progress >= self.duration:
            return self.max_seq_length
        if isinstance(self.pacing, discrete):
            return self.pacing.length_at(progress) or self.max_seq_length
        share = self.pacing(Fraction(progress) / Fraction(self.duration))
        if not math.isfinite(share):
            raise ValueError(f"pacing must return a finite number, got {share} at progress {progress}")
        steps = math.floor((self.max_seq_length - self.min_seq_length) * share / self.step_size)
        length = self.min_seq_length + self.step_size * steps
        return max(self.min_seq_length, min(length, self.max_seq_length))

    def milestones(self) -> list[Milestone]:
        """Every change of length, from progress 0 on; whole numbers of units.

        A pacing of your own is looked at in 65,536 places and searched between them, so a bump that is narrower
        than that, in a longer duration, can be missed.
        """
        end = math.ceil(self.duration)
        intervals = 1 if isinstance(self.pacing, (root, discrete)) or self.pacing is linear else _CALLABLE_GRID
        points = sorted({end * index // intervals for index in range(intervals + 1)})
        found = [Milestone(points[0], self.seq_length_at(points[0]))]
        for start, stop in pairwise(points):
            found += self._changes(start, stop, found[-1].seq_length, self.seq_length_at(stop))
        return found

    def _changes(self, start: int, stop: int, length: int, length_at_stop: int) -> Iterator[Milestone]:
        """The changes in (start, stop], by halving wherever the ends differ."""
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
        """`resize_batch` to the present length."""
        return resize_batch(batch, self.seq_length, **resize_options)

    def attach(self, model: nn.Module, **resize_options: Any) -> Attachment:
        """Resize what `model` is called with to the present length, in training mode only, before its forward.

        Tensor arguments take part by the names of the forward's parameters; a batch given as one mapping is resized
        as a whole. Name `keys` where other tensors of two dimensions go in: the source of an encoder-decoder, labels
        of rows. Losses must be computed in the forward, or from what it returns: labels kept outside stay long.
        Works on DistributedDataParallel, fully_shard, Accelerate and compiled models; attach last, so that compiling
        does not take the resizing into its graph. `num_items_in_batch`, which Hugging Face's trainer passes, is scaled
        by the share of labels that are left: exact where all batches of a step keep the same share. `generate` in
        training mode is a call like any other. Counting units stays with the caller of `step`.

        Args:
            model: the module that the training loop calls.
            resize_options: for `resize_batch`; `keys` names what to resize where other inputs must pass through.

        Returns:
            The attachment: `seq_length`, `take_seen()` for the tokens and samples since, `remove()`.

        Raises:
            TypeError, ValueError: `model` is no module or has an attachment already.
        """
        return Attachment(model, self, resize_options)

    def state_dict(self) -> dict[str, int | float | str]:
        """Plain numbers and strings: the progress, and the configuration it belongs to."""
        return {"progress": self.progress, **self._configuration()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take up the progress of a scheduler of the same configuration.

        Raises:
            ValueError: entries are missing, unknown, or of another configuration; nothing was changed.
        """
        check_state_entries(state_dict, self.state_dict())
        configuration = self._configuration()
        check_same_configuration({name: state_dict[name] for name in configuration}, configuration)
        check_int("progress", state_dict["progress"], minimum=0)
        self.progress = state_dict["progress"]

    def _configuration(self) -> dict[str, int | float | str]:
        return {
            "min_seq_length": self.min_seq_length,
            "max_seq_length": self.max_seq_length,
            "duration": self.duration,
            "step_size": self.step_size,
            "pacing": _describe(self.pacing),
            "unit": self.unit,
        }

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._configuration().items())
        return f"SequenceLengthScheduler({settings}, progress={self.progress})"


def _as_pacing(pacing: str | Pacing | discrete) -> Pacing | discrete:
    if pacing == "linear":
        return linear
    if isinstance(pacing, discrete) or callable(pacing):
        return pacing
    raise ValueError(f"pacing must be 'linear', root(degree), discrete(stages) or a function, got {pacing!r}")


def _describe(pacing: Pacing | discrete) -> str:
    """By value for the built-in pacings, by name for a function."""
    if isinstance(pacing, (root, discrete)):
        return repr(pacing)
    return getattr(pacing, "__qualname__", type(pacing).__qualname__)
