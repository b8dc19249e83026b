"""How much of a test runs in which tier."""

import pytest
from hypothesis import settings


def first_fast(cases, others="slow"):
    """The cases of a parametrized test: the first runs in `make test`, the others have a mark."""
    first, *rest = cases
    return [first, *(_marked(case, others) for case in rest)]


def _marked(case, name):
    mark = getattr(pytest.mark, name)
    if hasattr(case, "marks"):  # a pytest.param
        return case._replace(marks=[*case.marks, mark])
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=mark)


def examples(number, **more):
    """Settings of hypothesis with `number` examples, ten times as many in the exhaustive tier."""
    return settings(max_examples=number * settings.default.max_examples // 100, **more)
