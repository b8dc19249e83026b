"""What a trial reports, and what such a report must be."""

from __future__ import annotations

import math
import operator
from contextlib import suppress
from typing import Any, NamedTuple

from ..utils.checks import check_int


class Validation(NamedTuple):
    """What a trial reports when it validates."""

    progress: int  #: units of the schedule trained so far; more with every validation
    perplexity: float  #: on held-out sequences of the full length; inf or nan where training has diverged
    tokens: int | None = None  #: trained so far, if anyone wants to know what the search took


def checked(validation: Any, last: Validation | None) -> Validation:
    """In plain Python numbers, after the `last` one of its trial.

    Raises:
        TypeError, ValueError: it is no Validation, does not go on from the last, or is no perplexity.
    """
    if not isinstance(validation, Validation):
        raise TypeError(f"run_trial must yield Validation(progress, perplexity), got {validation!r}")
    progress = _count("progress", validation.progress)
    if last is not None and progress <= last.progress:
        raise ValueError(
            f"progress of a Validation must rise from validation to validation, got {progress} after "
            f"{last.progress}; was the scheduler stepped?"
        )
    tokens = None if validation.tokens is None else _count("tokens", validation.tokens)
    if tokens is not None and last is not None and tokens < (last.tokens or 0):
        raise ValueError(f"tokens of a Validation must not fall, got {tokens} after {last.tokens}")
    return Validation(progress, _perplexity(validation.perplexity), tokens)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, bool):
        with suppress(TypeError):  # named below
            value = operator.index(value)  # NumPy's integers, and tensors of one
    check_int(f"{name} of a Validation", value, minimum=0)
    return value


def _perplexity(value: Any) -> float:
    perplexity = _as_float(value)
    if perplexity < 1:
        raise ValueError(
            f"perplexity of a Validation must be at least 1 (it is exp of the loss in nats), got {perplexity}"
        )
    return perplexity


def _as_float(value: Any) -> float:
    """Of NumPy's numbers and of tensors of one, too; not of a string, which float() would read."""
    if not isinstance(value, (str, bytes, bytearray, bool)):
        with suppress(TypeError, ValueError, RuntimeError):  # named below
            try:
                return float(value)
            except OverflowError:
                return math.inf
    raise TypeError(f"perplexity of a Validation must be a number, got {value!r}")
