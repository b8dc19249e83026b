"""How many items make a window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..planning.plan import IntArray, Plan
from ..planning.planner import BatchPlanner

_ATTEMPTS = 4


def fitting(planner: BatchPlanner, lengths: IntArray, max_length: int | None, batches: int) -> int:
    """How many items, the first ones of `lengths`, make at most `batches` batches; at least one."""

    def fits(count: int) -> bool:
        return planner.num_batches(lengths[:count], max_length) <= batches

    low, high = 1, 2
    while high < len(lengths) and fits(high):
        low, high = high, 2 * high
    high = min(high, len(lengths))
    if fits(high):
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def filled(
    planner: BatchPlanner, lengths: IntArray, max_length: int | None, seeds: Sequence[int] | None
) -> tuple[int, Plan]:
    """How many items, the first ones of `lengths`, fill their packs, and the plan for them.

    All items would leave the last pack half empty on average.
    """
    tokens = np.cumsum(planner.tokens(lengths, max_length))
    assert planner.max_tokens is not None
    packs, room = int(tokens[-1]) // planner.max_tokens, 0
    for _ in range(_ATTEMPTS if packs else 0):
        count = int(np.searchsorted(tokens, packs * planner.max_tokens - room, side="right"))
        plan = planner.plan(lengths[:count], max_length=max_length, seeds=seeds)
        if count and len(plan) <= packs:
            return count, plan
        room = max(2 * room, int(plan.padded_tokens.min(initial=planner.max_tokens)))  # what overflowed
    return len(lengths), planner.plan(lengths, max_length=max_length, seeds=seeds)
