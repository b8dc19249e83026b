"""bench/training: what is read of runs, and two tiny ones."""

import inspect
import json
import math
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench.training import command, figures, held_out, plan, results, tables
from bench.training.experiments import Experiments
from bench.training.reading import as_demo_records, read_steps, read_validations
from bench.training.running import FINISHED, ROOT, OtherRun, Outcome, OutOfTime, RunFailed, Runner
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
    assert results.best_duration([first, third]) is None


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


def test_a_baseline_that_diverged_leaves_its_seed_in_the_table(tmp_path):
    baseline, warmup = (plan.Run(plan.TIME, duration, PEAK, 8, 1) for duration in (0.0, 0.3))
    outcomes = [
        outcome(tmp_path, [line(50, 4.0), line(100, 0, diverged=True)], baseline),
        outcome(tmp_path, [line(50, 3.0), line(100, 2.0)], warmup),
    ]
    found = results.time_results(outcomes, 256)
    assert [r.figures["final_loss"] for r in found] == [None, 2.0]
    assert [r.figures["sooner_in_tokens"] for r in found] == [None, None]
    assert "Seed 1: the baseline diverged" in tables.time_table(found)
    figures.draw_all(found, tmp_path / "figures", TOY)


def test_the_best_peak_is_that_of_all_seeds():
    def result(rate, share, loss):
        return results.Result("sweep", {"learning_rate": rate, "lr_warmup_share": share}, {"final_loss": loss})

    found = [result(1.0, 0.1, 3.0), result(1.0, 0.1, 3.0), result(2.0, 0.1, 2.0), result(2.0, 0.1, 3.5)]
    assert results.best_peak(found) == (2.0, 0.1)
    assert results.best_peak([*found, result(2.0, 0.1, None)]) == (1.0, 0.1)
    assert results.best_peak([*found, result(2.0, 0.2, 2.5)]) == (2.0, 0.2)
    assert results.best_peak([result(1.0, 0.1, None)]) is None


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


# ---- tables


def timed(duration, seed, sooner):
    shown = {"final_loss": 2.0, "steps": 3, "seconds": 1.0, "full_length_speed": 1.0, "target_loss": 2.0, "tokens": 9}
    shown.update(sooner_in_tokens=sooner, sooner_in_seconds=sooner, curve=[[9, 1.0, 2.0]])
    return results.Result(plan.TIME, {"duration": duration, "seed": seed, "batch_size": 8}, shown)


def test_seeds_that_did_not_reach_the_loss_are_told():
    found = [timed(0.0, 0, 1.0), timed(0.3, 0, 1.3), timed(0.3, 1, 1.2), timed(0.3, 2, None)]
    text = tables.time_table(found)
    assert "in tokens: 1.25 (1.20 to 1.30), reached in 2 of 3 seeds" in text
    assert "seed 0, which chose the duration: 1.30; the others: 1.20, —" in text
    assert "reached in 0 of 2 seeds" in tables.time_table([timed(0.3, 0, None), timed(0.3, 1, None)])


def test_durations_that_did_not_reach_the_loss_are_drawn():
    from matplotlib.figure import Figure

    axes = Figure().subplots(1, 2)
    figures._draw_time(list(axes), [timed(0.0, 0, 1.0), timed(0.3, 0, 1.3), timed(0.6, 0, None)])
    [missed] = [drawn for drawn in axes[1].lines if drawn.get_label() == "never reached"]
    assert list(missed.get_xdata()) == [0.6]


def test_what_cannot_be_compared_is_not_a_failure_to_train():
    def result(trains, seed=0):
        case = {"batch_size": 8, "learning_rate_factor": 4.0, "duration": 0.3, "seed": seed}
        shown = {"steps": 1, "spikes": 0, "largest_ratio": 1.0, "diverged": False, "trains": trains, "final_loss": 2.0}
        return results.Result(plan.STABILITY, case, shown)

    assert "| 0 | — | 2.000 |" in tables.stability_table([result(None)])
    assert "| 0 | 1 of 1 | 2.000, 2.000 |" in tables.stability_table([result(None), result(True, 1)])
    assert "| 0 | 0 | 2.000 |" in tables.stability_table([result(False)])


def test_columns_are_those_of_all_runs(tmp_path):
    def result(duration, losses):
        case = {"objective": "causal", "duration": duration, "seed": 0}
        return results.Result(plan.EXTRAPOLATION, case, {"loss_by_length": losses})

    found = [result(0.3, {"512": 2.5, "1024": 2.0}), result(0.0, {})]
    text = tables.extrapolation_table(found[::-1])
    assert "| loss at 512 | loss at 1024 |" in text
    assert "| causal | baseline | 0 | — | — |" in text
    figures.draw_all(found, tmp_path, TOY)


def test_an_attention_may_lack_a_length(tmp_path):
    def result(attention, stages):
        shown = {"tokens_per_second": 100.0, "by_length": stages, "busy": 0.0, "final_loss": 2.0}
        return results.Result(plan.SPEED, {"attention": attention, "seed": 0}, shown)

    stages = [[32, 100.0, 5], [64, 90.0, 5]]
    found = [result("package", stages[:1]), result("flex", stages), result("eager", [])]
    text = tables.speed_table(found)
    assert "| flex | 100 (100 to 100) | 100 | 90 |" in text
    assert "| package | 100 (100 to 100) | 100 | — |" in text
    assert figures.draw_all(found, tmp_path, TOY)


def test_p_is_missing_and_said_so():
    case = {"batch_size": 8, "learning_rate_factor": 1.0, "duration": 0.0, "seed": 0}
    shown = {f"ratio_with_variance_{name}": {"r": 0.5, "p": None, "steps": 9} for name in ("max", "l1")}
    assert "There was no scipy" in tables.correlation_table([results.Result(plan.STABILITY, case, shown)])


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


def test_what_a_finished_run_keeps(tiny):
    _, outcomes = tiny
    for outcome in outcomes:
        stored = json.loads((outcome.folder / FINISHED).read_text())
        assert stored["tokens"] == json.loads((outcome.folder / "config.json").read_text())["tokens"] != ""
        assert stored["environment"]["torch"] == torch.__version__
        assert (outcome.folder / "model.pt").exists()
        assert not (outcome.folder / "checkpoint.pt").exists()


def test_weights_that_nobody_reads_are_not_kept(tmp_path):
    runner = Runner(TOY, [], tmp_path)
    for experiment, kept in ((plan.STABILITY, []), (plan.SPEED, []), (plan.TIME, ["model.pt"])):
        run = plan.Run(experiment, 0.3, PEAK, 8, 0)
        folder = runner.folder(run)
        folder.mkdir(parents=True)
        for name in ("checkpoint.pt", "model.pt"):
            (folder / name).touch()
        runner._finish(Outcome(run, folder, None))
        assert sorted(path.name for path in folder.iterdir()) == [FINISHED, *kept]


def test_runs_of_another_text_are_not_mixed(tiny, tmp_path, capsys):
    runner, outcomes = tiny
    shutil.copytree(runner.out, tmp_path / "out")
    elsewhere = Runner(runner.scale, [tmp_path], tmp_path / "out")
    runs = [outcome.run for outcome in outcomes]
    assert len(elsewhere.finished(runs)) == 2
    assert capsys.readouterr().out.count("holds runs of the text") == 1
    path = elsewhere.folder(runs[1]) / FINISHED
    path.write_text(json.dumps({**json.loads(path.read_text()), "tokens": "others"}))
    with pytest.raises(OtherRun, match="another text"):
        Runner(runner.scale, runner.text, tmp_path / "out").finished(runs)


def test_flex_on_a_cpu_says_itself_that_it_cannot(tiny):
    runner, _ = tiny
    run = plan.Run(plan.SPEED, 0.3, PEAK, 8, 0, attention="flex")
    [refused] = runner.run_all([run], "flex")
    assert "NotImplementedError" in refused.failure
    assert runner.finished([run]) == [refused]


def test_a_failure_that_may_pass_is_tried_again(tmp_path, monkeypatch, capsys):
    runner = Runner(TOY, [], tmp_path)
    run = plan.Run(plan.SPEED, 0.7, PEAK, 8, 0, attention="flex")
    monkeypatch.setattr(Runner, "_process", lambda *_: (-9, "exit -9:  54% tokens"))
    assert runner.run_all([run], "killed")[0].failure == "exit -9:  54% tokens"
    assert "tries again" in capsys.readouterr().out
    assert runner.finished([run]) == []
    stored = {"arguments": runner._comparable(run), "failure": "exit -9:  54% tokens", "busy": 0}  # of before
    (runner.folder(run) / FINISHED).write_text(json.dumps(stored))
    assert runner.finished([run]) == []


def test_a_program_that_cannot_begin_is_not_out_of_time(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.executable", str(tmp_path / "nothing"))
    for minutes in (None, 5):
        with pytest.raises(RunFailed, match="nothing"):
            Runner(TOY, [], tmp_path, minutes).run_all([plan.Run(plan.TIME, 0.3, PEAK, 8, 0)], "none")


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
    (folder / held_out.SCORES).unlink()
    with pytest.raises(OutOfTime):
        held_out.score_run(folder, runner.out / "tokens", 5, "cpu", Runner(TOY, [], folder, minutes=0).check_time)
    assert held_out.read_scores(folder) is None


# ---- the command


def test_without_results_nothing_is_claimed():
    text = tables.report([], TOY)
    assert text.count("not yet measured") == 7


def test_options():
    parser = ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_args(["--out", "runs"])
    assert (given.scale, given.only, given.seeds, given.text) == ("toy", ["d", "a", "b", "c"], 3, None)
    assert parser.parse_args(["--out", "runs", "--only", "a", "c"]).only == ["a", "c"]


SMALL = replace(
    TOY,
    learning_rates=(1e-3, 2e-3),
    lr_warmup_shares=(0.05,),
    sweep_seeds=1,
    durations=(0.0, 0.3),
    learning_rate_factors=(1,),
    batch_factors=(1,),
    speed_repeats=1,
)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Call the command with runs that are written down at once: call(*arguments, loss=, diverges=) -> records."""
    monkeypatch.setitem(command.SCALES, "toy", SMALL)

    def write_run(self, run, loss, diverges):
        folder = self.folder(run)
        last = line(300, loss(run), diverged=diverges(run))
        write_lines(folder / "records.jsonl", [line(100, 4.0), last])
        write_lines(
            folder / "monitor.jsonl", [monitor_line(3.0 - 0.1 * i, 0.9 - 0.1 * i, 0.1 * i + 0.1) for i in range(5)]
        )
        stored = {"arguments": self._comparable(run), "failure": None, "busy": 0.0, "environment": {"cpu": "another"}}
        (folder / FINISHED).write_text(json.dumps(stored))
        return self._outcome(run)

    def make(*arguments, loss=lambda run: 2.0, diverges=lambda run: False):
        monkeypatch.setattr(Runner, "_train", lambda self, run: write_run(self, run, loss, diverges))
        parser = ArgumentParser()
        command.add_arguments(parser)
        command.main(parser.parse_args(["--out", str(tmp_path / "out"), "--text", str(tmp_path), *arguments]))
        return read(tmp_path / "out" / "cpu_training.jsonl")

    return make


def read(path):
    first, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    return first, rest


def test_where_warmup_loses_the_report_goes_on(call, capsys):
    _, found = call("--only", "a", loss=lambda run: 2.5 if run.duration else 2.0)
    assert {(r["case"]["duration"], r["figures"]["sooner_in_tokens"]) for r in found if r["experiment"] == "a"} == {
        (0.0, 1.0), (0.3, None),
    }  # fmt: skip
    assert "## (d) Speed" in capsys.readouterr().out


def test_where_every_baseline_diverges_the_report_goes_on(call, tmp_path):
    with pytest.raises(SystemExit, match="diverged at each learning rate"):
        call("--only", "d", "a", diverges=lambda run: run.experiment == plan.SWEEP)
    _, found = read(tmp_path / "out" / "cpu_training.jsonl")
    assert [r["experiment"] for r in found] == ["sweep"] * 2 + ["d"] * 3


def test_the_speed_needs_no_sweep(call):
    _, found = call("--only", "d")
    assert [r["experiment"] for r in found] == ["d"] * 3


def test_records_are_of_the_machine_that_trained(call):
    environment, _ = call("--only", "d")
    assert environment == {"cpu": "another"}
    assert command._merged([{"cpu": "a", "torch": "2"}, {"cpu": "b", "torch": "2"}]) == {"cpu": "a; b", "torch": "2"}


def test_without_scipy_and_matplotlib_there_are_records(call, monkeypatch, capsys):
    for name in [*(name for name in sys.modules if name.partition(".")[0] == "matplotlib"), "scipy", "scipy.stats"]:
        monkeypatch.setitem(sys.modules, name, None)
    _, found = call("--only", "b")
    [first, *_] = [r for r in found if r["experiment"] == "b"]
    assert first["figures"]["ratio_with_variance_max"] == {"r": pytest.approx(-1.0), "p": None, "steps": 5}
    assert "no figures" in capsys.readouterr().out


def test_runs_that_diverged_have_no_last_words(call):
    _, found = call("--only", "c", "--seeds", "1", diverges=lambda run: run.experiment == plan.EXTRAPOLATION)
    assert [r["figures"]["loss_by_length"] for r in found if r["experiment"] == "c"] == [{}] * 4


def test_a_text_of_code_has_no_last_words(tiny, monkeypatch, capsys):
    runner, outcomes = tiny

    def raises(*_):
        raise ValueError("documents must hold paragraphs of prose")

    monkeypatch.setattr("bench.training.experiments.score_run", raises)
    monkeypatch.setattr("bench.training.experiments.read_scores", lambda folder: None)
    experiments = Experiments(runner, 1)
    monkeypatch.setattr(experiments, "_finished", lambda experiment: outcomes)
    experiments._score_all()
    assert capsys.readouterr().out.count("last words are left out: documents must hold") == 1


def test_a_part_does_not_replace_what_is_published(call, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "published")
    monkeypatch.setattr(command, "FIGURES", tmp_path / "published")
    (tmp_path / "published").mkdir()
    call("--only", "d", "a", "--publish")
    whole = (tmp_path / "published" / "cpu_training.jsonl").read_bytes()
    call("--publish", "--only", "d")  # all of it, still
    for folder in (tmp_path / "out" / "runs").glob("time/*"):
        shutil.rmtree(folder)
    with pytest.raises(SystemExit, match=r"not published: .* that this folder lacks"):
        call("--publish", "--only", "d")
    assert (tmp_path / "published" / "cpu_training.jsonl").read_bytes() == whole


def test_results_of_extrapolation_stay_when_another_duration_is_best(call, monkeypatch):
    def cases(found):
        return {(r["case"]["duration"], r["case"]["seed"]) for r in found if r["experiment"] == "c"}

    monkeypatch.setitem(command.SCALES, "toy", replace(SMALL, durations=(0.0, 0.3, 0.6), extrapolate_timed=True))
    before = cases(call("--only", "c", "--seeds", "2")[1])
    assert before == {(0.0, 0), (0.3, 0), (0.0, 1), (0.3, 1)}
    after = cases(call("--only", "a", "--seeds", "2", loss=lambda run: 2.0 - run.duration)[1])
    assert after == before | {(0.6, 0), (0.6, 1)}


def test_records_are_json(tmp_path):
    command._write(
        tmp_path / "records.jsonl", {}, [results.Result("c", {}, {"loss_by_length": {"256": NAN, "512": 1}})]
    )
    assert "NaN" not in (tmp_path / "records.jsonl").read_text()
    assert read(tmp_path / "records.jsonl")[1][0]["figures"] == {"loss_by_length": {"256": None, "512": 1}}


def test_the_command_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import bench.training.command"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
