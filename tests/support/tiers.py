"""How much of a test runs in which tier."""

import pytest
from hypothesis import settings


def first_fast(cases):
    """The cases of a parametrized test: the first runs in `make test`, the others are slow."""
    first, *others = cases
    return [first, *map(_slow, others)]


def _slow(case):
    if hasattr(case, "marks"):  # a pytest.param
        return case._replace(marks=[*case.marks, pytest.mark.slow])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


def examples(number, **more):
    """Settings of hypothesis with `number` examples, ten times as many in the exhaustive tier."""
    return settings(max_examples=number * settings.default.max_examples // 100, **more)
