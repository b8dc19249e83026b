"""bench/training: what is read of runs, and two tiny ones."""

import inspect
import json
import math
from argparse import ArgumentParser
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is not installed")
pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench.training import figures, held_out, plan, results, tables
from bench.training.command import add_arguments
from bench.training.reading import as_demo_records, read_steps, read_validations
from bench.training.running import FINISHED, Outcome, OutOfTime, RunFailed, Runner
from bench.training.scales import TOY

NAN = math.nan
PEAK = plan.Peak(1e-3, 0.05)


# ---- reading and results


def line(tokens, loss, *, length=256, diverged=False):
    return {
        "step": tokens // 10,
        "tokens": tokens,
        "seconds": tokens / 100,
        "seq_length": length,
        "learning_rate": 1e-3,
        "train_loss": None if diverged else loss,
        "validation_loss": {} if diverged else {"256": loss, "512": loss + 1},
        "tokens_per_second": 100.0,
        "peak_memory_bytes": 5_000_000,
        "diverged": diverged,
    }


def write_lines(path, lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def outcome(folder, lines, run, monitor=()):
    write_lines(folder / run.name / "records.jsonl", lines)
    write_lines(folder / run.name / "monitor.jsonl", monitor)
    return Outcome(run, folder / run.name, None)


def test_validations_are_read(tmp_path):
    write_lines(tmp_path / "records.jsonl", [line(100, 3.0), line(200, 2.0), line(300, 0, diverged=True)])
    first, second, third = read_validations(tmp_path)
    assert first.validation_loss == {256: 3.0, 512: 4.0}
    assert (second.tokens, second.seconds, third.diverged) == (200, 2.0, True)
    assert [record.validation_loss for record in as_demo_records([first, second, third], 512)] == [4.0, 3.0]
    assert as_demo_records([first, second], 1024) == []
    write_lines(tmp_path / "records.jsonl", [{"step": 1}])
    with pytest.raises(ValueError, match=r"records\.jsonl cannot be read"):
        read_validations(tmp_path)


def monitor_line(loss, ratio, variance):
    return {"step": 1, "loss": loss, "loss_ratio": ratio, "variance_l1": 2 * (variance or 0), "variance_max": variance}


def test_steps_are_read_with_gaps(tmp_path):
    lines = [monitor_line(3.0, 1.0, 0.1), monitor_line(None, None, None), monitor_line(2.0, 0.5, 0.2)]
    write_lines(tmp_path / "monitor.jsonl", lines)
    steps = read_steps(tmp_path)
    np.testing.assert_array_equal(steps.loss, [3.0, NAN, 2.0])
    np.testing.assert_array_equal(steps.variance_max, [0.1, NAN, 0.2])
    np.testing.assert_array_equal(steps.variance_l1, [0.2, 0.0, 0.4])


def test_time_to_the_baselines_final_loss(tmp_path):
    baseline, warmup, lost = (plan.Run(plan.TIME, duration, PEAK, 8, 0) for duration in (0.0, 0.3, 0.6))
    half = plan.Run(plan.TIME, 0.0, PEAK, 4, 0)
    outcomes = [
        outcome(tmp_path, [line(100, 4.0), line(200, 3.0), line(400, 2.0)], baseline),
        outcome(tmp_path, [line(100, 4.0), line(320, 1.0)], half),
        outcome(tmp_path, [line(100, 4.0), line(200, 2.5), line(300, 1.5)], warmup),
        outcome(tmp_path, [line(100, 4.0), line(400, 2.5)], lost),
    ]
    first, control, second, third = results.time_results(outcomes, 256)
    assert control.figures["target_loss"] == 2.0
    assert first.figures["sooner_in_tokens"] == 1.0
    assert second.figures["target_loss"] == 2.0
    assert second.figures["reached_after_tokens"] == pytest.approx(250)
    assert second.figures["sooner_in_tokens"] == pytest.approx(400 / 250)
    assert second.figures["sooner_in_seconds"] == pytest.approx(4.0 / 2.5)
    assert first.figures["full_length_speed"] == pytest.approx(100)
    assert third.figures["reached_after_tokens"] is None
    assert third.figures["sooner_in_seconds"] is None
    later = results.Result(plan.TIME, {"duration": 0.15, "seed": 0}, {"reached_after_seconds": 2.6})
    assert results.best_duration([first, later, second, third]) == 0.3
    with pytest.raises(ValueError, match="no duration reached"):
        results.best_duration([first, third])


def test_a_timed_run_that_diverged_has_no_loss(tmp_path):
    baseline, warmup = (plan.Run(plan.TIME, duration, PEAK, 8, 0) for duration in (0.0, 0.3))
    outcomes = [
        outcome(tmp_path, [line(100, 4.0)], baseline),
        outcome(tmp_path, [line(50, 0, diverged=True)], warmup),
    ]
    _, second = results.time_results(outcomes, 256)
    assert second.figures["final_loss"] is None
    assert second.figures["sooner_in_tokens"] is None
    assert results.time_results(outcomes[1:], 256) == []


def test_the_best_peak_is_that_of_all_seeds():
    def result(rate, share, loss):
        return results.Result("sweep", {"learning_rate": rate, "lr_warmup_share": share}, {"final_loss": loss})

    found = [result(1.0, 0.1, 3.0), result(1.0, 0.1, 3.0), result(2.0, 0.1, 2.0), result(2.0, 0.1, 3.5)]
    assert results.best_peak(found) == (2.0, 0.1)
    assert results.best_peak([*found, result(2.0, 0.1, None)]) == (1.0, 0.1)
    assert results.best_peak([*found, result(2.0, 0.2, 2.5)]) == (2.0, 0.2)
    with pytest.raises(ValueError, match="diverged at each"):
        results.best_peak([result(1.0, 0.1, None)])


def test_stability(tmp_path):
    runs = {
        (factor, duration): plan.Run(plan.STABILITY, duration, PEAK._replace(rate=1e-3 * factor), 8, 0)
        for factor in (1, 4)
        for duration in (0.0, 0.3)
    }
    monitor = [monitor_line(3.0 - 0.1 * i, ratio, 0.1 * ratio) for i, ratio in enumerate([1.0, 0.9, 1.5, 0.8])]
    losses = {(1, 0.0): 2.0, (1, 0.3): 2.19, (4, 0.0): 2.21}
    outcomes = [outcome(tmp_path, [line(100, loss)], runs[key], monitor) for key, loss in losses.items()]
    diverged = [line(100, 3.0), line(200, 0, diverged=True)]
    outcomes.append(outcome(tmp_path, diverged, runs[4, 0.3], [*monitor, monitor_line(None, None, None)]))
    found = {(r.case["learning_rate_factor"], r.case["duration"]): r.figures for r in
             results.stability_results(outcomes, PEAK)}  # fmt: skip
    assert {key: figures["trains"] for key, figures in found.items()} == {
        (1, 0.0): True, (1, 0.3): True, (4, 0.0): False, (4, 0.3): False,
    }  # fmt: skip
    assert found[4, 0.3]["diverged"]
    assert not found[4, 0.0]["diverged"]
    assert (found[4, 0.3]["spikes"], found[4, 0.0]["spikes"]) == (2, 1)
    assert found[1, 0.0]["largest_ratio"] == 1.5
    assert found[1, 0.0]["ratio_with_variance_max"]["r"] == pytest.approx(1.0)


# ---- two runs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Two finished runs: (runner, outcomes)."""
    folder = tmp_path_factory.mktemp("experiments")
    text = folder / "text"
    text.mkdir()
    source = inspect.getsource(ArgumentParser)
    for part in range(8):
        prose = f"{' '.join(['A sentence of words and more'] * 5)} in file number ending {'abcdefgh'[part]}pple.\n\n"
        (text / f"{part}.txt").write_text(prose + source[part * 2000 : part * 2000 + 4000])
    scale = replace(
        TOY, vocab_size=300, seq_length=32, min_seq_length=8, total_tokens=1024, validation_tokens=256, last_words=5
    )
    runner = Runner(scale, [text], folder / "out")
    return runner, runner.run_all(plan.extrapolation_runs(scale, PEAK, 1)[:2], "tiny")


def test_two_runs_train(tiny):
    runner, outcomes = tiny
    assert [outcome.failure for outcome in outcomes] == [None, None]
    found = results.extrapolation_results(outcomes)
    for result in found:
        assert list(result.figures["loss_by_length"]) == ["32", "64", "128"]
        assert all(math.isfinite(loss) for loss in result.figures["loss_by_length"].values())
    assert found[0].figures != found[1].figures
    lengths = [{v.seq_length for v in read_validations(outcome.folder)} for outcome in outcomes]
    assert lengths[0] == {32} < lengths[1] | {32}
    assert "warmup 0.3" in tables.extrapolation_table(found)
    assert [path.name for path in figures.draw_all(found, runner.out / "figures", runner.scale)] == [
        "training_extrapolation.png"
    ]


def test_finished_runs_are_read(tiny, monkeypatch):
    runner, outcomes = tiny
    monkeypatch.setattr(Runner, "_train", None)
    assert runner.run_all([outcome.run for outcome in outcomes], "again") == outcomes
    other = Runner(replace(runner.scale, total_tokens=2048), runner.text, runner.out)
    with pytest.raises(ValueError, match="other settings"):
        other.run_all([outcomes[0].run], "other")


def test_time_that_is_over_stops(tiny):
    runner, outcomes = tiny
    run = replace(outcomes[0].run, seed=7)
    with pytest.raises(OutOfTime, match="seed7"):
        Runner(runner.scale, runner.text, runner.out, minutes=0).run_all([run], "late")
    with pytest.raises(OutOfTime, match="seed7"):  # it has begun, and is stopped
        Runner(runner.scale, runner.text, runner.out, minutes=0.01).run_all([run], "late")
    assert not (runner.folder(run) / FINISHED).exists()
    assert runner.finished([run]) == []


def test_a_run_that_fails_says_why(tiny):
    runner, outcomes = tiny
    missing = Runner(runner.scale, [runner.out / "nowhere"], runner.out)
    run = replace(outcomes[0].run, seed=8)
    with pytest.raises(RunFailed, match=r"seed8 failed: .*nowhere.*seed8\.log"):
        missing.run_all([run], "failing")
    assert runner.finished([run]) == []


def test_last_words_of_a_run(tiny):
    runner, outcomes = tiny
    folder = outcomes[0].folder
    assert held_out.read_scores(folder) is None
    held_out.score_run(folder, runner.out / "tokens", 5, "cpu")
    scores = held_out.read_scores(folder)
    assert 1 <= len(scores.right) == len(scores.nats) <= 5
    assert scores.perplexity > 1


# ---- the command


def test_without_results_nothing_is_claimed():
    text = tables.report([], TOY)
    assert text.count("not yet measured") == 7


def test_options():
    parser = ArgumentParser()
    add_arguments(parser)
    given = parser.parse_args(["--out", "runs"])
    assert (given.scale, given.only, given.seeds, given.text) == ("toy", ["a", "b", "c", "d"], 3, None)
    assert parser.parse_args(["--out", "runs", "--only", "a", "c"]).only == ["a", "c"]
