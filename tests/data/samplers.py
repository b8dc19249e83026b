"""Samplers over one synthetic data set."""

import numpy as np
from hypothesis import strategies as st

from seqwarm_kernels.data import BatchPlanner, LengthBatchSampler

LENGTHS = np.random.default_rng(0).lognormal(3, 0.9, 700).astype(int).clip(0, 200)

RULES = {
    "budget": {"max_tokens": 512, "multiple_of": 8},
    "rows": {"batch_size": 7},
    "packed": {"max_tokens": 512, "packed": True},
    "split": {"max_tokens": 64, "too_long": "split"},
    "truncate": {"max_tokens": 64, "too_long": "truncate", "packed": True},
}


def sampler(lengths=LENGTHS, rule="budget", **options):
    planner = BatchPlanner(**RULES[rule] if isinstance(rule, str) else rule)
    return LengthBatchSampler(lengths, planner, **options)


rules = st.sampled_from(
    [
        {"max_tokens": 60},
        {"max_tokens": 64, "multiple_of": 8},
        {"batch_size": 3},
        {"max_tokens": 60, "packed": True},
        {"max_tokens": 10, "too_long": "split"},
        {"max_tokens": 10, "too_long": "truncate"},
        {"max_tokens": 12, "too_long": "split", "packed": True},
    ]
)
windows = st.none() | st.integers(1, 50)


def ranks_of(world_size, make):
    return [list(make(rank=rank, world_size=world_size)) for rank in range(world_size)]
