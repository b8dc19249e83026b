"""What is compared: the figures of each optimizer step, of each evaluation, and the weights at the end."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Record:
    """The figures of a training, or of this rank's part of it.

    `lengths` of the model's inputs, `losses` and `rates` have one entry for each optimizer step, from `first` on.
    `evaluations` are (steps so far, length, loss) of each batch. Of the oracle alone: the norm of the gradients of each
    step before clipping, the schedule's length, the tokens of all ranks after it, and the schedule's progress at the
    end.
    """

    first: int = 0
    lengths: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    evaluations: list[tuple[int, int, float]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    scheduled: list[int] = field(default_factory=list)
    train_tokens: list[int] = field(default_factory=list)
    progress: int = 0

    @property
    def steps(self) -> int:
        return self.first + len(self.lengths)


def combined(parts, rule):
    """The loss of a step from (rows, loss) of its batches: see the rules of `oracle.Rule`."""
    losses = [loss for _, loss in parts]
    if rule == "labels":
        return sum(losses)
    if rule == "batches":
        return sum(losses) / len(losses)
    return sum(rows * loss for rows, loss in parts) / sum(rows for rows, _ in parts)


def record_of(model, rule, first=0):
    """The record of what a model was called with since its calls were cleared."""
    made, parts, lengths = Record(first), [], set()
    for call in model.calls:
        if call[0] == "step":
            made.lengths.append(lengths.pop() if len(lengths) == 1 else lengths)  # of all batches of a step, one
            made.losses.append(combined(parts, rule))
            made.rates.append(call[1])
            parts, lengths = [], set()
        elif call[0]:
            parts.append((call[1], call[3]))
            lengths.add(call[2])
        else:
            made.evaluations.append((made.steps, call[2], call[3]))
    made.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return made
