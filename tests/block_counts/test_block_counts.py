"""The kernels do no more work than recorded. Counts of basic blocks do not depend on other processes, as times do.

After a change that is meant to do another amount of work, `make record-work` writes new counts.
"""

import pytest

from tests.block_counts import cases

pytestmark = pytest.mark.skipif(cases.counter() is None, reason="needs a build that counts work: make test-work")

#: Relative. Counts are exact, but any edit changes some of them a little.
TOLERANCE = 0.002


@pytest.mark.parametrize("name", cases.CASES)
def test_work_is_as_recorded(name):
    known = cases.records().get(cases.machine())
    if known is None:
        pytest.skip(f"no records of {cases.machine()}")
    assert cases.measure(cases.CASES[name], cases.counter()) == pytest.approx(known[name], rel=TOLERANCE)
