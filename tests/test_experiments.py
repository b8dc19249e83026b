"""The experiments run at a tiny size, go on where they stopped, and write records, tables and figures."""

import inspect
import math
from argparse import ArgumentParser
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("scipy", reason="scipy is not installed")

from experiments import figures, last_words, plan, results, tables
from experiments.running import Runner, load_script
from experiments.scales import TOY
from experiments.stability import batches, training
from experiments.stability.settings import WARMUP, Setting

pytestmark = pytest.mark.xdist_group("train_gpt2")  # one worker loads the script and trains what tests share
TINY = replace(TOY, vocab_size=300, seq_length=32, min_seq_length=8, total_tokens=1024, validation_tokens=256)


def train_in_this_process(runner, run, log):
    load_script().train.main(run.arguments(runner.scale, runner.text, runner.out))
    return 0, ""


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    source = inspect.getsource(ArgumentParser)
    for part in range(8):
        prose = f"{' '.join(['A sentence of words and more'] * 5)} in file number ending {'abcdefgh'[part]}pple.\n\n"
        (folder / f"{part}.txt").write_text(prose + source[part * 2000 : part * 2000 + 4000])
    return folder


@pytest.mark.slow
def test_two_runs_train_and_are_read_again(text, tmp_path, monkeypatch):
    monkeypatch.setattr(Runner, "_process", train_in_this_process)
    runner = Runner(replace(TINY, last_words=5), [text], tmp_path / "out")
    runs = plan.extrapolation_runs(runner.scale, plan.Peak(1e-3, 0.05), 1)[:2]
    outcomes = runner.run_all(runs, "tiny")
    assert [outcome.failure for outcome in outcomes] == [None, None]
    found = results.extrapolation_results(outcomes)
    for result in found:
        assert list(result.figures["loss_by_length"]) == ["32", "64", "128"]
        assert all(math.isfinite(loss) for loss in result.figures["loss_by_length"].values())
    assert "warmup 0.3" in tables.extrapolation_table(found)
    drawn = figures.draw_all(found, tmp_path / "figures", runner.scale)
    assert [path.name for path in drawn] == ["training_extrapolation.png"]
    last_words.score_run(outcomes[0].folder, runner.out / "tokens", 5, "cpu")
    assert last_words.read_scores(outcomes[0].folder).perplexity > 1
    monkeypatch.setattr(Runner, "_train", None)  # finished runs are read
    assert runner.run_all(runs, "again") == outcomes


def test_a_run_of_the_search_for_stability_repeats(monkeypatch):
    def windows(seq_length):  # each counts upwards from a start of its own
        rows = (torch.arange(50)[:, None] + torch.arange(seq_length + 1)).to(torch.uint8)
        return rows, rows[:32]

    monkeypatch.setattr(batches, "windows", windows)
    sizes = {"layers": 1, "width": 16, "heads": 1, "seq_length": 32, "min_seq_length": 8, "rows": 4, "tokens": 1024}
    setting = Setting(1e-2, kind=WARMUP, duration=0.5, **sizes)
    found, again = training.train(setting), training.train(setting)
    assert Setting(**found["setting"]) == setting
    assert found["figures"]["final_loss"] > 0
    assert again["figures"] | {"seconds": 0} == found["figures"] | {"seconds": 0}
