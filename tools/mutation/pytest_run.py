"""A run of pytest on a mutant: `python -m tools.mutation.pytest_run TESTS`, or in a fork."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

_OPTIONS = (
    *("-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation"),
    *("-m", "not exhaustive and not gpu"),
)


def run_pytest(tests: Sequence[str], plugins: list[Any]) -> int:
    import pytest
    from hypothesis import Phase, settings

    # The same examples in each run. No smaller one is searched for one that fails.
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutation", deadline=None, derandomize=True, phases=phases, database=None)
    return int(pytest.main([*_OPTIONS, *tests], plugins))


if __name__ == "__main__":
    sys.exit(run_pytest(sys.argv[1:], []))
