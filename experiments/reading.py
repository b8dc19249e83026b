"""Read validations and monitored steps from the folder of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqwarm_kernels.demo.records import Record

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class ValidationRecord:
    """One line of records.jsonl."""

    step: int
    tokens: int
    seconds: float  #: time of training, without validation
    seq_length: int
    learning_rate: float
    train_loss: float | None
    validation_loss: dict[int, float]  #: by length; nats per token
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    diverged: bool


@dataclass(frozen=True)
class Steps:
    """The columns of monitor.jsonl, one value for each optimizer step. Values that are not finite are NaN."""

    loss: FloatArray
    loss_ratio: FloatArray
    variance_l1: FloatArray
    variance_max: FloatArray


def read_validations(folder: Path) -> list[ValidationRecord]:
    """The lines of records.jsonl.

    Raises:
        ValueError: A line is not a record of the script.
    """
    path = folder / "records.jsonl"
    try:
        return [_validation(line) for line in _objects(path)]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error!r}") from error


def _validation(line: dict[str, Any]) -> ValidationRecord:
    values = {field.name: line[field.name] for field in fields(ValidationRecord)}
    losses = {int(length): _number(loss) for length, loss in (values["validation_loss"] or {}).items()}
    return ValidationRecord(**{**values, "validation_loss": losses})


def read_steps(folder: Path) -> Steps:
    lines = list(_objects(folder / "monitor.jsonl"))
    return Steps(*(np.array([_number(line[field.name]) for line in lines]) for field in fields(Steps)))


def _number(value: object) -> float:
    """JSON has no NaN. It is written as null or as a string."""
    return float(value) if isinstance(value, (int, float, str)) else math.nan


def _objects(path: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in path.read_text().splitlines() if line)


def as_demo_records(validations: Sequence[ValidationRecord], length: int) -> list[Record]:
    """The finite losses at `length`, as records for the demo's comparison."""
    losses = [validation.validation_loss.get(length, math.nan) for validation in validations]
    return [
        Record("run", v.step, v.tokens, v.seconds, v.seq_length, v.learning_rate, v.train_loss, loss)
        for v, loss in zip(validations, losses, strict=True)
        if math.isfinite(loss)
    ]
