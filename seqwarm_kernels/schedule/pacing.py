"""Pacings: the share of the growth to the full length at each point of the warmup."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from random import Random

from ..utils.checks import check_int, check_real

#: Maps x in [0, 1), an exact fraction of the warmup's duration, to the share of the growth to the full length, 0 to 1.
Pacing = Callable[[Fraction], float | Fraction]


def linear(x: Fraction) -> Fraction:
    """g(x) = x."""
    return x


class _Named:
    """A pacing whose repr identifies it in the state of a schedule."""

    parts: int | None = 1  #: number of equal parts of the duration in each of which no length falls

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(str, vars(self).values()))})"


class root(_Named):
    """g(x) = x^(1 / degree), degree > 0. For degrees above 1 lengths grow fast at first; root(1) is linear."""

    def __init__(self, degree: float) -> None:
        degree = check_real("degree", degree)
        if degree <= 0:
            raise ValueError(f"degree must be positive, got {degree}")
        self.degree = degree

    def __call__(self, x: Fraction) -> float:
        return float(x) ** (1 / self.degree)


def sine(x: Fraction) -> float:
    """g(x) = sin(π x / 2). Lengths grow fast at first and slowly at last.

    Source: T. Zhu et al., "SkyLadder", arXiv 2503.15450.
    """
    return math.sin(math.pi / 2 * float(x))


_BY_NAME: dict[str, Pacing] = {"linear": linear, "sine": sine}


class exponential(_Named):
    """g(x) = (ratio^x − 1) / (ratio − 1), ratio > 1. Lengths grow slowly at first.

    With `ratio` = max_seq_length / min_seq_length they grow by the same factor in equal times. Source: T. Zhu et al.,
    "SkyLadder", arXiv 2503.15450.
    """

    def __init__(self, ratio: float) -> None:
        ratio = check_real("ratio", ratio)
        if ratio <= 1:
            raise ValueError(f"ratio must be above 1, got {ratio}")
        self.ratio = ratio

    def __call__(self, x: Fraction) -> float:
        return math.expm1(float(x) * math.log(self.ratio)) / (self.ratio - 1)


class doubling(_Named):
    """Lengths min, 2 · min, 4 · min, ... up to 2^times · min, each for the same number of units; times >= 1.

    Exact if max_seq_length is 2^times · min_seq_length and `step_size` divides min_seq_length.
    """

    def __init__(self, times: int) -> None:
        self.times = check_int("times", times, minimum=1)

    def __call__(self, x: Fraction) -> Fraction:
        return Fraction(2 ** math.floor(x * (self.times + 1)) - 1, 2**self.times - 1)


class cyclic(_Named):
    """The growth of another pacing, `cycles` times one after another. Lengths fall where a cycle begins.

    ``cyclic(doubling(5), cycles=8)`` is close to the curriculum Grow-P2, which draws the lengths of a cycle at random
    (`grow_p2`); here they come in order.

    Args:
        pacing: As for `SequenceLengthScheduler`, but not `discrete`, whose stages are numbers of units.
        cycles: At least 1.
    """

    def __init__(self, pacing: str | Pacing, cycles: int) -> None:
        self.pacing = as_function(pacing)
        self.cycles = check_int("cycles", cycles, minimum=1)
        parts = rises(self.pacing)
        self.parts = None if parts is None else parts * self.cycles

    def __call__(self, x: Fraction) -> float | Fraction:
        return self.pacing(x * self.cycles % 1)

    def __repr__(self) -> str:
        return f"cyclic({describe(self.pacing)}, {self.cycles})"


class grow_p2(_Named):
    """Lengths min, 2 · min, ... 2^times · min in random order, in `cycles` cycles.

    In a cycle each length is drawn `draws` times, each time for the same number of units. A length has twice the odds
    of the next longer one, as long as it has draws left. The order depends on `seed` alone, so it is the same on all
    ranks and after a restart. Lengths are exact as for `doubling`. Source: Grow-P2 of H. Pouransari et al., "Dataset
    Decomposition", NeurIPS 2024, arXiv 2405.13226, for buckets with as many tokens each; the authors' code multiplies
    the odds of a length by the number of its tokens.

    Args:
        times, cycles, draws: At least 1.
        seed: Of the order.
    """

    def __init__(self, times: int, cycles: int, draws: int, *, seed: int = 0) -> None:
        self._doubling = doubling(times)
        self.times = self._doubling.times
        self.cycles = check_int("cycles", cycles, minimum=1)
        self.draws = check_int("draws", draws, minimum=1)
        self.seed = check_int("seed", seed)
        random = Random(self.seed)
        self.order: list[int] = []  #: number of doublings in each part of the duration
        for _ in range(self.cycles):
            left = [self.draws] * (self.times + 1)
            while any(left):
                odds = [2.0**-index if count else 0 for index, count in enumerate(left)]
                (drawn,) = random.choices(range(len(left)), odds)
                left[drawn] -= 1
                self.order.append(drawn)
        self.parts = len(self.order)

    def __call__(self, x: Fraction) -> Fraction:
        return self._doubling(Fraction(self.order[math.floor(x * len(self.order))], self.times + 1))

    def __repr__(self) -> str:
        return f"grow_p2({self.times}, {self.cycles}, {self.draws}, seed={self.seed})"


class discrete(_Named):
    """Stages (units, length), one after another. After the last stage comes the full length.

    The lengths must not fall. They need not be multiples of a step size.
    """

    def __init__(self, stages: Iterable[tuple[int, int]]) -> None:
        self.stages = [(check_int("units", units, minimum=1), check_int("length", length)) for units, length in stages]
        lengths = [length for _, length in self.stages]
        if lengths != sorted(lengths):
            raise ValueError(f"stage lengths must not decrease, got {lengths}; use a custom pacing function for that")

    def length_at(self, progress: float) -> int | None:
        """The length of the stage at `progress`, or None after the last stage."""
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
                raise ValueError(f"stages must have lengths from {min_seq_length} to {max_seq_length}, got {length}")


def as_function(pacing: str | Pacing) -> Pacing:
    if isinstance(pacing, str) and pacing in _BY_NAME:
        return _BY_NAME[pacing]
    if callable(pacing) and not isinstance(pacing, type):  # the call of a class would make a pacing
        return pacing
    raise ValueError(f"pacing must be 'linear', 'sine' or a function from [0, 1) to [0, 1], got {pacing!r}")


def describe(pacing: Pacing | discrete) -> str:
    """How a state names a pacing."""
    if isinstance(pacing, _Named):
        return repr(pacing)
    return getattr(pacing, "__qualname__", type(pacing).__qualname__)


def rises(pacing: Pacing | discrete) -> int | None:
    """The number of equal parts of the duration in each of which no length falls. None if that is not known."""
    if isinstance(pacing, _Named):
        return pacing.parts
    return 1 if pacing in (linear, sine) else None
