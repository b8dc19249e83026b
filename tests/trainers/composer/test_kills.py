"""A training of Composer's trainer that is killed at a random moment resumes, and ends on the same bits."""

import pytest

from ...faults import trainings
from ...support.kills import KILLS, assert_kills_change_nothing

pytest.importorskip("composer", reason="needs Composer: make test-composer")


@pytest.mark.parametrize("kills", KILLS)
def test_kills(tmp_path, kills):
    assert_kills_change_nothing(tmp_path, trainings.composer, trainings.assert_same_end, kills=kills)
