"""The calls on which candidates are compared with the reference, and those that are timed, by the kernels they take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from seqwarm_kernels.self_check.calls import Attention

from ...alibi_attention.problems import TINY, Problem, of_length


class Group(NamedTuple):
    checked: list[Attention]  #: what matters most first
    timed: list[Problem]


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


GROUPS: dict[str, Group] = {}
for _head_dim in (64, 128):
    GROUPS |= {
        f"dense {_head_dim}": Group(
            [Attention({}, (256, 600), (1, 1), _head_dim), *_checked(_head_dim, (2, 1), (140,))],  # the first one skips
            [of_length(length, _head_dim) for length in (128, 512, 2048, 16384)],
        ),
        f"short {_head_dim}": Group(
            _checked(_head_dim, (4, 4), (8, 40)),
            [of_length(length, _head_dim) for length in (8, 64)],
        ),
        f"grouped {_head_dim}": Group(
            _checked(_head_dim, (8, 2), (8, 40)), [_grouped(length, _head_dim) for length in (8, 64)]
        ),
        f"rows of 128, {_head_dim}": Group(
            _checked(_head_dim, (2, 2), (65, 128)),
            [of_length(length, _head_dim) for length in (96, 128)],
        ),
    }


def timed(cases: tuple[str, ...], tiny: bool) -> list[Problem]:
    return [TINY] if tiny else [problem for name in cases for problem in GROUPS[name].timed]
