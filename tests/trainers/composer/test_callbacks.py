"""What callbacks promise in Composer's trainer alone; test_contract.py has the rest."""

import pytest

pytest.importorskip("composer", reason="needs Composer: make test-composer")

from seqwarm_kernels.trainers.composer import Alibi, Monitor, SeqLengthWarmup, TokenCounter

from .training import LENGTH, Run


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


def test_a_further_fit_continues_the_ramp_and_the_records():
    records = []
    run = Run("2ba", Alibi(LENGTH), SeqLengthWarmup(0.5, 4, 8, 4), callbacks=[Monitor(records.append)]).fit()
    run.trainer.fit(duration="2ba")
    assert run.seen.lengths == [4, 8, 8, 8]
    assert [record.step for record in records] == [1, 2, 3, 4]
    assert records[2].loss_ratio != 1.0
