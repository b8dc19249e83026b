"""What Monitor promises in Composer's trainer alone; test_monitors.py has the rest."""

import pytest

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from seqwarm_kernels.trainers.composer import Monitor

from .training import Run


def test_a_further_fit_continues_the_count():
    records = []
    run = Run("3ba", callbacks=[Monitor(records.append)]).fit()
    run.trainer.fit(duration="2ba")
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert records[3].loss_ratio != 1.0
