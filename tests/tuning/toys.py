"""Toy trainings for the tuner, with known stable candidates."""

import inspect
import json.decoder
import math

import torch
import torch.nn.functional as F

from seqwarm_kernels.demo.model import build_model, next_byte_loss
from seqwarm_kernels.demo.text import training_batch, validation_set
from seqwarm_kernels.tuning import Validation


class Formula:
    """Perplexity falls, and jumps halfway if `is_stable` says that the candidate is not stable."""

    def __init__(self, is_stable, jump=2.0, every=10):
        self.is_stable, self.jump, self.every = is_stable, jump, every
        self.asked, self.closed = [], []

    def __call__(self, scheduler, end):
        candidate = scheduler.min_seq_length, scheduler.duration
        self.asked.append(candidate)
        noise = torch.rand(()).item()  # so that validations depend on the random stream
        try:
            for progress in range(0, 10 * end, self.every):
                scheduler.step(self.every if progress else 0)
                assert scheduler.progress == progress
                perplexity = 100 / (1 + progress) + 10 + noise
                jumps = progress >= end // 2 and not self.is_stable(*candidate)
                yield Validation(progress, perplexity * (self.jump if jumps else 1), 100 * progress)
        finally:
            self.closed.append(candidate)


class SummedLoss:
    """A small transformer trained by SGD on the sum of the tokens' losses.

    The gradient grows with the length. At the full length, the peak learning rate is above the largest stable learning
    rate; later, the decayed learning rate is below it.
    """

    seq_length, steps, learning_rate_warmup, learning_rate = 128, 200, 20, 3e-3

    def __init__(self):
        text = torch.tensor(list(inspect.getsource(json.decoder).encode()), dtype=torch.uint8)
        self.training, self.validation = text[:-2000], validation_set(text[-2000:], 8, self.seq_length)

    def __call__(self, scheduler, end):
        model = build_model(layers=2, heads=4, width=32, seed=0, device="cpu")
        optimizer = torch.optim.SGD(model.parameters())
        for step in range(self.steps + 1):
            if step % 5 == 0:
                loss = self.validate(model)
                yield Validation(step, math.exp(min(loss, 100.0)) if math.isfinite(loss) else math.inf)
            optimizer.param_groups[0]["lr"] = self.learning_rate * self.share_of_peak(step)
            batch = scheduler.resize(training_batch(self.training, 0, step, 4, self.seq_length))
            losses = F.cross_entropy(
                model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), reduction="sum"
            )
            optimizer.zero_grad()
            (losses / 4).backward()
            optimizer.step()
            scheduler.step()

    def share_of_peak(self, step):
        if step < self.learning_rate_warmup:
            return (step + 1) / self.learning_rate_warmup
        decayed = (step - self.learning_rate_warmup) / (self.steps - self.learning_rate_warmup)
        return (1 + math.cos(math.pi * decayed)) / 2

    @torch.no_grad()
    def validate(self, model):
        return next_byte_loss(model(self.validation["input_ids"]), self.validation).item()
