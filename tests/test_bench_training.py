"""bench/training: two tiny runs, and the command."""

import inspect
import json
import math
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from dataclasses import replace

import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed")
pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from bench.training import command, figures, last_words, plan, publishing, results, tables
from bench.training.experiments import Experiments
from bench.training.reading import read_validations
from bench.training.running import FINISHED, ROOT, OtherRun, OutOfTime, RunFailed, Runner, RunOutcome, load_script
from bench.training.scales import TOY

from .test_bench_training_results import line, monitor_line, write_lines

pytestmark = pytest.mark.xdist_group("train_gpt2")  # one worker loads the script and trains what tests share
NAN = math.nan
PEAK = plan.Peak(1e-3, 0.05)


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_process", train_in_this_process)
        return runner, runner.run_all(plan.extrapolation_runs(scale, PEAK, 1)[:2], "tiny")


def train_in_this_process(runner, run, log):
    load_script().train.main(run.arguments(runner.scale, runner.text, runner.out))
    return 0, ""


@pytest.mark.slow
def test_a_run_has_its_own_process(tiny):
    runner, outcomes = tiny
    [outcome] = runner.run_all([replace(outcomes[0].run, seed=9)], "own process")
    assert outcome.failure is None
    assert "tokens" in outcome.folder.with_name(f"{outcome.folder.name}.log").read_text()


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
        run = plan.RunPlan(experiment, 0.3, PEAK, 8, 0)
        folder = runner.folder(run)
        folder.mkdir(parents=True)
        for name in ("checkpoint.pt", "model.pt"):
            (folder / name).touch()
        runner._finish(RunOutcome(run, folder, None))
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


@pytest.mark.slow
def test_flex_on_a_cpu_says_itself_that_it_cannot(tiny):
    runner, _ = tiny
    run = plan.RunPlan(plan.SPEED, 0.3, PEAK, 8, 0, attention="flex")
    [refused] = runner.run_all([run], "flex")
    assert "NotImplementedError" in refused.failure
    assert runner.finished([run]) == [refused]


def test_a_failure_that_may_pass_is_tried_again(tmp_path, monkeypatch, capsys):
    runner = Runner(TOY, [], tmp_path)
    run = plan.RunPlan(plan.SPEED, 0.7, PEAK, 8, 0, attention="flex")
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
            Runner(TOY, [], tmp_path, minutes).run_all([plan.RunPlan(plan.TIME, 0.3, PEAK, 8, 0)], "none")


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


@pytest.mark.slow
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
    assert last_words.read_scores(folder) is None
    last_words.score_run(folder, runner.out / "tokens", 5, "cpu")
    scores = last_words.read_scores(folder)
    assert 1 <= len(scores.right) == len(scores.nats) <= 5
    assert scores.perplexity > 1
    (folder / last_words.SCORES).unlink()
    with pytest.raises(OutOfTime):
        last_words.score_run(folder, runner.out / "tokens", 5, "cpu", Runner(TOY, [], folder, minutes=0).check_time)
    assert last_words.read_scores(folder) is None


# ---- the command


def test_without_results_nothing_is_claimed():
    text = tables.report([], TOY)
    assert text.count("not yet measured") == 8


def test_options():
    parser = ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_args(["--out", "runs"])
    assert (given.scale, given.only, given.seeds, given.text) == ("toy", ["d", "a", "b", "c", "e"], 3, None)
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
    monkeypatch.setattr("seqwarm_kernels.utils.figures.png", lambda draw, theme: draw() and b"")

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


def test_constant_tokens_need_no_sweep_and_record_no_times(call, capsys):
    _, found = call("--only", "e", "--seeds", "2", loss=lambda run: 2.0 + 0.5 * (run.tokens == plan.SCALED))
    assert [r["experiment"] for r in found] == ["e"] * 12
    assert {r["case"]["tokens"] for r in found} == {plan.TRUNCATED, plan.CONSTANT, plan.SCALED}
    assert all(r["figures"]["tokens"] == 300 and r["figures"]["curve"] for r in found)
    assert not [
        name for r in found for name in r["figures"] if "second" in name or name in ("busy", "full_length_speed")
    ]
    printed = capsys.readouterr().out
    assert "constant tokens in a step: 12 of 12 runs left, 7.2 M tokens\n" in printed
    assert "| warmup 0.3 | 8 | constant-scaled | 30 | 2.500, 2.500 | 2.500 | -0.500, -0.500 | —, — |" in printed


def test_what_is_left_is_estimated_from_what_is_finished(tiny):
    runner, outcomes = tiny
    others = [replace(outcomes[0].run, seed=seed) for seed in (10, 11, 12)]
    assert runner.estimate([outcome.run for outcome in outcomes]) == "0 of 2 runs left, 0.0 M tokens"
    found = runner.estimate([outcomes[0].run, *others])
    seconds = read_validations(outcomes[0].folder)[-1].seconds
    assert found == f"3 of 4 runs left, 0.0 M tokens, about {3 * seconds / 60:.0f} minutes of training"


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
    assert capsys.readouterr().out.count("last words are skipped: documents must hold") == 1


@pytest.mark.slow
def test_a_part_does_not_replace_what_is_published(call, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "RESULTS", tmp_path / "published")
    monkeypatch.setattr(command, "FIGURES", tmp_path / "published")
    (tmp_path / "published").mkdir()
    call("--only", "d", "a", "--publish")
    whole = (tmp_path / "published" / "cpu_training.jsonl").read_bytes()
    call("--publish", "--only", "d")  # all of it, still
    for folder in (tmp_path / "out" / "runs").glob("time/*"):
        shutil.rmtree(folder)
    with pytest.raises(SystemExit, match=r"not published: .* missing here"):
        call("--publish", "--only", "d")
    assert (tmp_path / "published" / "cpu_training.jsonl").read_bytes() == whole


@pytest.mark.slow
def test_results_of_extrapolation_stay_when_another_duration_is_best(call, monkeypatch):
    def cases(found):
        return {(r["case"]["duration"], r["case"]["seed"]) for r in found if r["experiment"] == "c"}

    monkeypatch.setitem(command.SCALES, "toy", replace(SMALL, durations=(0.0, 0.3, 0.6), extrapolate_timed=True))
    before = cases(call("--only", "c", "--seeds", "2")[1])
    assert before == {(0.0, 0), (0.3, 0), (0.0, 1), (0.3, 1)}
    after = cases(call("--only", "a", "--seeds", "2", loss=lambda run: 2.0 - run.duration)[1])
    assert after == before | {(0.6, 0), (0.6, 1)}


def test_records_are_json(tmp_path):
    publishing.write(tmp_path / "records.jsonl", {}, [{"figures": {"loss_by_length": {"256": NAN, "512": 1}}}])
    assert "NaN" not in (tmp_path / "records.jsonl").read_text()
    assert read(tmp_path / "records.jsonl")[1] == [{"figures": {"loss_by_length": {"256": None, "512": 1}}}]


@pytest.mark.slow
def test_the_command_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import bench.training.command"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=120)
