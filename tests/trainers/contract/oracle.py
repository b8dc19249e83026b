"""A training loop written by hand: Python lists are cut, rows go through the model's layers one by one, and the
optimizer is one line. It shares the model's layers with the package's trainings, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from ...support.token_rates import SCHEDULERS
from .cases import (
    BATCH_SIZE,
    EPOCHS,
    EVALUATED,
    FAILS_AT,
    IGNORED,
    LEARNING_RATE,
    LENGTH,
    LONGEST,
    PADDING,
    SHORTEST,
    STEP_SIZE,
    Model,
    items,
)
from .record import Record


@dataclass(frozen=True)
class Rule:
    """How a trainer makes a step's loss of its batches, and what it counts.

    Attributes:
        loss: "labels": the mean over all labels of a step. "batches": the mean of the batches' means. "rows": the
            batches of a step are cut as one; then their rows are trained on 2 by 2, and each mean weighs by its rows.
        counts_whole_rows: "sample" and "token" count batches before they are cut.
    """

    loss: Literal["labels", "batches", "rows"]
    counts_whole_rows: bool = False


def cut(rows, length, *, packed=False, mode="truncate", remainder="drop", keep_last_token=False, boundaries=None):
    """The rows of a batch at a length, or the pieces of packed sequences. An entry is (token, label), or PADDING.

    Of segments, each row is a list of its pieces.
    """
    if mode == "segments":
        valid = [[entry for entry in row if entry is not PADDING] for row in rows]
        return [[row[start : start + length] for start in range(0, len(row), length)] for row in valid]
    if mode == "flatten" and not packed:
        stream = [entry for row in rows for entry in row]
        return [stream[start : start + length] for start in range(0, len(stream) - length + 1, length)]
    made = []
    for row in rows:
        if mode == "truncate":
            valid = [entry for entry in row if entry is not PADDING]
            last = row[length - 1 : length]
            if keep_last_token and len(valid) > length:
                last = valid[-1:]
            made.append(row[: length - 1] + last)
            continue
        pieces = [row[start : start + length] for start in range(0, len(row), length)]
        missing = length - len(pieces[-1])
        if missing and not packed:  # of packed sequences, nothing is lost and nothing padded
            if remainder == "drop":
                pieces.pop()
            elif remainder == "pad":
                pieces[-1] = pieces[-1] + [PADDING] * missing
            else:
                again = [entry if entry is PADDING else (entry[0], IGNORED) for entry in pieces[-2][-missing:]]
                pieces[-1] = again + pieces[-1]
        made += pieces
    return made


def pieces_of(rows):
    return [piece for row in rows for piece in (row if isinstance(row[0], list) else [row])]


def logits_of(model, row):
    """(length, words) of one row: each token sees those before it and itself, and no padding."""
    tokens = torch.tensor([0 if entry is PADDING else entry[0] for entry in row])
    is_valid = torch.tensor([[float(entry is not PADDING)] for entry in row], dtype=torch.float64)
    inputs = model.tokens.weight[tokens] + model.positions.weight[: len(row)]
    mean = (inputs * is_valid).cumsum(0) / is_valid.cumsum(0).clamp(min=1)
    return model.head(torch.tanh(inputs + mean))


def summed_loss(model, rows, packed=False):
    """The sum of −log p over all labels of a batch, and their number. Pieces of packed sequences follow each other."""
    parts = [(piece, logits_of(model, piece)) for piece in pieces_of(rows)]
    if packed and not isinstance(rows[0][0], list):
        parts = [(as_one(rows), torch.cat([logits for _, logits in parts]))]
    total, count = torch.zeros((), dtype=torch.float64), 0
    for row, logits in parts:
        for index in range(1, len(row)):
            label = IGNORED if row[index] is PADDING else row[index][1]
            if label != IGNORED:
                total = total - logits[index - 1].log_softmax(0)[label]
                count += 1
    return total, count


def loss_of_step(model, batches, rule, packed):
    if rule.loss == "rows" and not packed:
        (rows,) = batches
        batches = [rows[start : start + BATCH_SIZE] for start in range(0, len(rows), BATCH_SIZE)]
    parts = [summed_loss(model, rows, packed) for rows in batches]
    if rule.loss == "labels":
        return sum(total for total, _ in parts) / sum(count for _, count in parts)
    means = [total / max(count, 1) for total, count in parts]
    if rule.loss == "batches" or packed:
        return sum(means) / len(means)
    return sum(mean * len(rows) for mean, rows in zip(means, batches, strict=True)) / sum(map(len, batches))


def length_at(case, progress):
    steps = (LONGEST - SHORTEST) * progress // (case.duration * STEP_SIZE)
    return LONGEST if progress >= case.duration else SHORTEST + STEP_SIZE * steps


def batches_of(case, rule, world_size=1):
    """The batches of each optimizer step of an epoch, on all ranks."""
    data = items(case)
    batches = [data[start : start + BATCH_SIZE] for start in range(0, len(data), BATCH_SIZE)]
    together = case.accumulate * world_size
    steps = [batches[start : start + together] for start in range(0, len(batches), together)]
    if rule.loss != "rows":
        return steps
    return [[as_one(step[rank::world_size]) for rank in range(world_size)] for step in steps]


def as_one(batches):
    return [row for batch in batches for row in batch]


def train(case, rule, model=None, *, world_size=1):
    """The record of a training of `model` from the schedule's start."""
    model = Model() if model is None else model
    is_packed = case.is_packed
    rate_at = SCHEDULERS[case.rates][1] if case.rates else lambda tokens: LEARNING_RATE
    made, tokens = Record(), 0
    for step, batches in enumerate(batches_of(case, rule, world_size) * EPOCHS):
        if step == (FAILS_AT if case.fails else case.max_steps) or (case.total_tokens and tokens >= case.total_tokens):
            break
        length = length_at(case, made.progress)
        resized = [cut(rows, length, packed=is_packed, **case.options) for rows in batches]
        loss = sum_of_ranks(model, resized, rule, is_packed, world_size)
        rate = rate_at(tokens)
        parameters = [*model.parameters()]
        gradients = torch.autograd.grad(loss, parameters)
        norm = sum(gradient.square().sum().item() for gradient in gradients) ** 0.5
        share = min(1.0, case.clip / (norm + 1e-6)) if case.clip else 1.0  # as torch clips
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.data -= rate * share * gradient
        new = sum(entry is not PADDING for rows in resized for row in pieces_of(rows) for entry in row)
        tokens += new
        made.progress += counted(case, rule, batches, resized, new)
        made.scheduled.append(length)
        made.lengths.append(max(len(row) for rows in resized for row in pieces_of(rows)))
        made.losses.append(loss.item())
        made.rates.append(rate)
        made.norms.append(norm)
        made.train_tokens.append(tokens)
        if case.evaluate_every and made.steps % case.evaluate_every == 0:
            made.evaluations += evaluate(case, model, made.steps)
    made.weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    return made


def sum_of_ranks(model, batches, rule, packed, world_size):
    if rule.loss == "rows":  # each rank has one batch
        return sum(loss_of_step(model, [rows], rule, packed) for rows in batches) / world_size
    return loss_of_step(model, batches, rule, packed)


def counted(case, rule, whole, resized, tokens):
    if case.unit == "step":
        return 1
    if rule.counts_whole_rows:
        return sum(map(len, whole)) * {"sample": 1, "token": LENGTH}[case.unit]
    return tokens if case.unit == "token" else sum(map(len, resized))


def evaluate(case, model, steps):
    """(steps so far, length, loss) of each batch of an evaluation, on whole rows."""
    data, packed = items(case)[:EVALUATED], case.is_packed
    batches = [data[start : start + BATCH_SIZE] for start in range(0, EVALUATED, BATCH_SIZE)]
    with torch.no_grad():
        sums = [summed_loss(model, rows, packed) for rows in batches]
    longest = [max(map(len, rows)) for rows in batches]
    return [(steps, length, (total / count).item()) for length, (total, count) in zip(longest, sums, strict=True)]
