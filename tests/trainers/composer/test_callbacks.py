"""What callbacks promise in Composer's trainer alone; test_contract.py and test_monitors.py have the rest."""

import pytest

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from seqwarm_kernels.trainers.composer import Monitor, TokenCounter

from .training import Run


def test_a_counter_that_counts_nothing_raises(tmp_path):
    counter = TokenCounter()
    with pytest.raises(ValueError, match="count_tokens"):
        counter.count_tokens()
    Run("2ba", callbacks=[counter]).fit()
    with pytest.raises(ValueError, match="count_tokens"):
        counter.count_tokens()
    for value in (0, 1.5, True):
        with pytest.raises((TypeError, ValueError), match="total_tokens"):
            TokenCounter(value)
    Run("2ba", save_folder=str(tmp_path), save_interval="2ba").fit()
    with pytest.raises(ValueError, match="TokenCounter"):
        Run("4ba", callbacks=[TokenCounter()], load_path=str(tmp_path / "ep0-ba2-rank0.pt")).fit()


def test_a_further_fit_continues_the_count_of_a_monitor():
    records = []
    run = Run("3ba", callbacks=[Monitor(records.append)]).fit()
    run.trainer.fit(duration="2ba")
    assert [record.step for record in records] == [1, 2, 3, 4, 5]
    assert records[3].loss_ratio != 1.0
