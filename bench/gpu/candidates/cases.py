"""The calls on which candidates are compared with the reference, and those that are timed, by the kernels they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from seqwarm_kernels.attention.calls import DEFAULT_SKIP_TOLERANCE
from seqwarm_kernels.self_check.calls import Attention

from ...alibi_attention.problems import TINY, Problem, of_length


class Timed(NamedTuple):
    problem: Problem
    skip_tolerance: float = 0.0

    def case(self) -> str:
        return f"{self.problem.case()}, skipping" if self.skip_tolerance else self.problem.case()


class Group(NamedTuple):
    checked: list[Attention]  #: what matters most first
    timed: list[Timed]


_OPTIONS: tuple[dict[str, Any], ...] = ({}, {"causal": False}, {"window": 20}, {"causal": False, "dropout_p": 0.3})


def _checked(head_dim: int, heads: tuple[int, int], lengths: tuple[int, ...]) -> list[Attention]:
    """Every option once, in rows of different lengths."""
    calls = [Attention(each, (length, length), heads, head_dim) for each in _OPTIONS for length in lengths]
    first = calls[0]
    large = replace(first, options={"scale": 30.0})  # one score has all the weight of a query
    return [first, large, replace(first, token_major=True), replace(first, masked=True), *calls[1:]]


def _grouped(length: int, head_dim: int) -> Problem:
    problem = of_length(length, head_dim)
    return replace(problem, key_heads=problem.heads // 4)


def _of_lengths(head_dim: int, *lengths: int, skip_tolerance: float = 0.0) -> list[Timed]:
    return [Timed(of_length(length, head_dim), skip_tolerance) for length in lengths]


GROUPS: dict[str, Group] = {}
for _head_dim in (64, 128):
    _dense = [Attention({}, (256, 600), (1, 1), _head_dim), *_checked(_head_dim, (2, 1), (140,))]  # the first one skips
    GROUPS |= {
        f"dense {_head_dim}": Group(_dense, _of_lengths(_head_dim, 128, 512, 2048, 16384)),
        f"skipping {_head_dim}": Group(
            _dense, _of_lengths(_head_dim, 1024, 4096, 16384, skip_tolerance=DEFAULT_SKIP_TOLERANCE)
        ),
        f"short {_head_dim}": Group(_checked(_head_dim, (4, 4), (8, 40)), _of_lengths(_head_dim, 8, 64)),
        f"grouped {_head_dim}": Group(
            _checked(_head_dim, (8, 2), (8, 40)), [Timed(_grouped(length, _head_dim)) for length in (8, 64)]
        ),
        f"rows of 128, {_head_dim}": Group(_checked(_head_dim, (2, 2), (65, 128)), _of_lengths(_head_dim, 96, 128)),
    }


def timed(cases: tuple[str, ...], tiny: bool) -> list[Timed]:
    return [Timed(TINY)] if tiny else [each for name in cases for each in GROUPS[name].timed]
