"""Toy trainings for the tuner, with known stable candidates."""

import torch

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
