"""bench/training/stability: definitions on made-up runs, the plan, batches, two tiny runs, tables and the command."""

import json
import math
from argparse import ArgumentParser
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("scipy", reason="scipy is not installed")

from bench.training import command as training_command
from bench.training import publishing
from bench.training.stability import arms, batches, command, definitions, outcomes, search, tables, training, tuner
from bench.training.stability.outcomes import Run
from bench.training.stability.running import finished, missing, path_of, run_all
from bench.training.stability.settings import BATCH, CONSTANT, KINDS, POST, SHORT, WARMUP, Setting

TINY = Setting(1e-2, layers=1, width=16, heads=1, seq_length=32, min_seq_length=8, rows=4, tokens=1024)


# ---- definitions


def test_a_loss_ratio_is_relative_to_the_smallest_loss_before():
    assert definitions.loss_ratios(np.array([4.0, 2.0, 3.0, 1.0, 1.3])).tolist() == [1.0, 0.5, 1.5, 0.5, 1.3]
    ratios = definitions.loss_ratios(np.array([2.0, math.nan, 3.0]))
    assert math.isnan(ratios[1])
    assert ratios[2] == 1.5


@pytest.mark.parametrize(
    ("losses", "final", "expected"),
    [
        ([3.0, 2.0, 2.5, 2.1, 2.0], 2.0, True),  # never below the first tenth's best
        ([3.0, 2.0, 2.5, 1.9, 2.5], 2.5, False),  # once is enough
        ([3.0, 2.0, 1.9, 2.1, 2.0], 2.0, False),  # a tenth is late
        ([3.0, 2.0, 1.0, 1.0, 1.0], None, True),
        ([3.0, 2.0, 1.0, math.inf, 1.0], 1.0, True),
    ],
)
def test_a_run_diverges(losses, final, expected):
    before = np.array([0.0, 50, 100, 500, 900])
    assert definitions.diverges(np.array(losses), before, 1000, final) is expected


def test_intervals_are_those_of_the_textbook():
    found = definitions.share(4, 5)
    assert found == pytest.approx((0.8, 0.2836, 0.9949), abs=1e-4)  # Clopper and Pearson
    assert definitions.share(0, 5).low == 0
    assert definitions.share(5, 5).high == 1


# ---- outcomes


def record(name, rate, seed, loss, spikes=0, diverges=False):
    figures = {"final_loss": loss, "spikes": spikes, "diverges": diverges, "steps": 10, "largest_ratio": 1.3}
    figures |= {"r_l1": 0.1, "r_max": -0.1, "r_l1_after_peak": None, "r_max_after_peak": 0.2}
    figures |= {"probes": [[0, 1.0, 5.5], [9, 2.0, None]], "curve": [[0, 3.0, 4.0], [9, 2.0, 2.5]], "seconds": 1.0}
    return {"name": name, "setting": replace(TINY, rate=rate, seed=seed).to_json(), "figures": figures}


def test_runs_are_judged_by_the_best_baseline():
    records = [record("baseline", 1e-3, seed, loss) for seed, loss in enumerate((2.0, 2.2))]
    records += [record("baseline", 1e-2, 0, 1.0), record("baseline", 1e-2, 1, None, diverges=True)]
    records += [record("warmup", 1e-2, 0, 2.3), record("warmup", 1e-2, 1, 2.32)]
    runs = outcomes.judge(records, "baseline")  # the best is 2.1: the larger rate diverged once
    assert [run.trains for run in outcomes.of(runs, "warmup", 1e-2)] == [True, False]
    assert [run.trains for run in outcomes.of(runs, "baseline", 1e-2)] == [True, False]
    assert outcomes.gained_and_lost(runs, "warmup", "baseline", 1e-2) == (0, 0, 2)
    assert outcomes.largest_rate([run for run in runs if run.arm == "baseline"]) == 1e-3


def regime(*trains_by_rate, spikes=1):
    return [
        Run("r", 10.0**power, seed, trains, {"spikes": spikes, "diverges": False})
        for power, seeds in enumerate(trains_by_rate)
        for seed, trains in enumerate(seeds)
    ]


def test_an_unstable_regime_fails_at_two_rates_and_trains_below():
    assert outcomes.is_unstable_regime(regime([True], [False], [False]))
    assert not outcomes.is_unstable_regime(regime([True], [True], [False])), "one rate"
    assert not outcomes.is_unstable_regime(regime([False], [False], [True])), "no lower rate trains"
    assert not outcomes.is_unstable_regime(regime([True], [False], [False], spikes=0)), "slow is not unstable"
    assert not outcomes.is_unstable_regime(regime([True], [False, True], [False, False])), "half of the seeds"


# ---- the plan


def test_names_tell_settings_apart():
    settings = {*search.all_settings(), *arms.full_settings(), *arms.quick_settings(), *arms.first_settings()}
    assert len({setting.name for setting in settings}) == len(settings)
    assert set(arms.quick_settings()) <= set(arms.first_settings()) <= set(arms.full_settings())
    for comparison in arms.COMPARISONS:
        for setting in comparison.settings():
            assert comparison.setting(comparison.arm_of(setting), setting.rate, setting.seed) == setting
            assert setting.tokens == comparison.setting(arms.FIRST, setting.rate, 0).tokens


def test_the_regimes_are_those_of_the_search():
    assert arms.MAIN.changes in search.REGIMES.values()
    assert arms.PRE_NORM.changes in search.REGIMES.values()


def test_the_learning_rate_follows_tokens():
    setting = Setting(1.0, tokens=1000, lr_warmup=0.1)
    assert [setting.learning_rate(tokens) for tokens in (0, 50, 100)] == [0, 0.5, 1]
    assert setting.learning_rate(1000) == pytest.approx(0.1)
    assert setting.learning_rate(550) == pytest.approx(0.55)
    assert replace(TINY, lr_warmup=0.25).steps_to_peak() == 2
    assert replace(TINY, lr_warmup=0.25, kind=WARMUP, duration=1.0).steps_to_peak() == 8  # of 32 tokens


# ---- batches


@pytest.fixture
def text(monkeypatch):
    """Windows that count upwards, each from a start of its own."""
    import torch

    def made(seq_length):
        rows = (torch.arange(50)[:, None] + torch.arange(seq_length + 1)).to(torch.uint8)
        return rows, rows[:32]

    monkeypatch.setattr(batches, "windows", made)


def shapes(setting):
    drawn, found = batches.Batches(setting), []
    while drawn.scheduler.progress < setting.tokens:
        planned = setting.shape(drawn.scheduler.seq_length)
        batch = drawn.next()
        assert batch["input_ids"].shape == planned
        assert (batch["labels"] == batch["input_ids"] + 1).all()
        found.append(tuple(batch["input_ids"].shape))
    assert drawn.scheduler.progress == sum(rows * length for rows, length in found)
    return found


@pytest.mark.usefixtures("text")
def test_batches_of_each_kind():
    assert set(shapes(TINY)) == {(4, 32)}
    assert set(shapes(replace(TINY, kind=SHORT))) == {(16, 8)}
    warm = shapes(replace(TINY, kind=WARMUP, duration=0.5))
    assert warm[0] == (4, 8)
    assert warm[-1] == (4, 32)
    constant = shapes(replace(TINY, kind=CONSTANT, duration=0.5))
    assert constant[0] == (16, 8)
    assert {rows * length for rows, length in constant} <= {128, 96, 4 * 24}
    batch = shapes(replace(TINY, kind=BATCH, duration=0.5))
    assert batch[0] == (1, 32)
    assert batch[-1] == (4, 32)
    assert {length for _, length in batch} == {32}


@pytest.mark.usefixtures("text")
def test_equal_seeds_draw_the_same_windows():
    def starts(setting):
        drawn = batches.Batches(setting)
        return [start for _ in range(4) for start in drawn.next()["input_ids"][:, 0].tolist()]

    few = replace(TINY, kind=BATCH, duration=1.0)
    assert starts(TINY) == starts(replace(TINY, kind=WARMUP, duration=0.5))
    assert starts(TINY)[:4] == starts(few)[:4]
    assert starts(TINY) != starts(replace(TINY, seed=1))


# ---- runs


@pytest.mark.usefixtures("text")
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_has_a_record_in_plain_json(kind):
    setting = replace(TINY, kind=kind, duration=0.5, norm=POST, clip=1.0)
    found = training.train(setting)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    figures = found["figures"]
    assert Setting(**found["setting"]) == setting
    assert figures["final_loss"] > 0
    assert figures["steps"] >= 8
    assert figures["probes"][-1][0] >= setting.tokens
    again = training.train(setting)["figures"]
    assert again | {"seconds": 0} == figures | {"seconds": 0}


@pytest.mark.usefixtures("text")
def test_a_loss_that_is_not_finite_ends_the_run(monkeypatch):
    monkeypatch.setattr(training.Trainer, "step", lambda trainer: (math.nan, 1.0, 1.0, 1.0))
    figures = training.train(TINY)["figures"]
    assert (figures["final_loss"], figures["steps"], figures["diverges"], figures["spikes"]) == (None, 1, True, 1)


def test_finished_runs_are_not_done_again(tmp_path):
    settings = [TINY, replace(TINY, seed=1)]
    path_of(tmp_path, TINY).write_text(json.dumps({"setting": TINY.to_json(), "figures": {}}))
    assert missing(tmp_path, settings) == settings[1:]
    assert [each["setting"]["seed"] for each in finished(tmp_path, settings)] == [0]
    run_all(None, tmp_path, settings[:1], 1, "nothing to do")


@pytest.mark.usefixtures("text")
def test_the_tuner_counts_its_cost():
    setting = replace(TINY, seq_length=256, min_seq_length=64, tokens=8192, lr_warmup=0.1)
    found = tuner.search(setting)
    figures = found["figures"]
    assert figures["found"]
    assert figures["trials"] > 1
    assert 0 < figures["share_of_grid"] < 1
    assert any(found["setting"]["duration"] == pytest.approx(share, abs=1e-3) for share in tuner.DURATIONS)


# ---- tables and the command


def made_records():
    def of(part, name, rate, seed, loss, **more):
        made = record(name, rate, seed, loss, spikes=2)
        rows = 16 if more.get("comparison") == arms.LARGE.name else TINY.rows
        made["setting"] = replace(TINY, rate=rate, seed=seed, rows=rows).to_json()
        return {"part": part, **made, **more}

    losses = {arms.FIRST: {1e-3: 2.0, 1e-2: 3.0}, arms.BEST: {1e-3: 2.1, 1e-2: 2.0}}
    found = [
        of(outcomes.ARMS, name, rate, seed, loss, comparison=comparison.name)
        for comparison in arms.COMPARISONS
        for name, by_rate in losses.items()
        for rate, loss in by_rate.items()
        for seed in range(3)
    ]
    found += [of(outcomes.SEARCH, "post-norm", rate, 0, rate * 1000 + 1) for rate in (1e-3, 1e-2)]
    found += [of(outcomes.SEARCH, search.FIRST, rate, 1, 2.0) for rate in (1e-3, 1e-2)]
    tuned = of(outcomes.TUNER, outcomes.TUNER, 1e-2, 0, 2.0)
    tuned["figures"] |= {"trials": 3, "share_of_grid": 0.05, "found": True}
    return [*found, tuned]


def test_tables_show_who_trains():
    made = made_records()
    text = tables.report(made)
    assert tables.NOT_YET not in text
    assert tables.NOT_YET in tables.report([])
    share = tables.TABLES["seeds that train"](made)
    assert f"| {arms.FIRST} | 3 of 3 (29% to 100%) | 0 of 3 (0% to 71%) |" in share
    assert "3 gained, 0 lost, of 6" in tables.summary_table(made)
    assert "2.00; 2 spikes" in tables.search_table(made)
    assert "(11.00)" in tables.search_table(made)
    assert f"| {search.FIRST} | 2 | +0.10 to +0.10 | -0.10 to -0.10 |" in tables.beta2_table(made)
    assert "| from 8 over 0% | 3 | 5.0% | 2.00 | yes |" in tables.tuner_table(made)


def test_the_figures_have_both_kinds_of_run():
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from bench.training.stability import figures
    from seqwarm_kernels.utils.figures import style

    from .support.figures import check_readable

    runs = tables.compared(made_records())
    assert figures.telling_rate(runs) == 1e-2
    with style():
        for figure in (figures.rates_figure(runs, 2.0), figures.runs_figure(runs)):
            check_readable(figure)
            assert {line.get_gid() for line in figure.axes[0].lines if line.get_gid()} == {
                figures.SHOWN[arms.FIRST],
                figures.SHOWN[arms.BEST],
            }


def test_published_runs_are_not_lost(tmp_path):
    published, made = tmp_path / "published.jsonl", made_records()
    publishing.write(published, {}, made)
    assert publishing.refusal(published, made, command.KEY) is None
    assert "holds 1 results that are missing" in publishing.refusal(published, made[1:], command.KEY)
    assert publishing.refusal(tmp_path / "none.jsonl", [], command.KEY) is None


def test_the_estimate_counts_what_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "published_seconds", lambda: {TINY.name: 600.0})
    settings = [TINY, replace(TINY, seed=1)]
    assert command.estimate(tmp_path, settings, 2) == "2 of 2 runs left, about 10 minutes with 2 processes"
    path_of(tmp_path, TINY).write_text("{}")
    assert command.estimate(tmp_path, settings, 1) == "1 of 2 runs left, about 10 minutes with 1 processes"


def parsed(*given):
    parser = ArgumentParser()
    training_command.add_arguments(parser)
    return parser.parse_args(given)


@pytest.mark.usefixtures("text")
def test_the_command_trains_and_publishes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(arms, "quick_settings", lambda: [TINY])
    monkeypatch.setattr(arms.Comparison, "settings", lambda comparison: [TINY] if comparison == arms.MAIN else [])
    monkeypatch.setattr(arms.Comparison, "arm_of", lambda comparison, setting: arms.FIRST)
    monkeypatch.setattr(command, "RESULTS", tmp_path)
    monkeypatch.setattr(training_command, "FIGURES", tmp_path / "figures")
    monkeypatch.setattr(command, "run_all", lambda work, folder, settings, jobs, title: in_this_process(work, folder))
    arguments = parsed("--only", "stability", "--quick", "--publish", "--out", str(tmp_path / "out"))
    training_command.main(arguments)
    printed = capsys.readouterr().out
    assert "1 of 1 runs left" in printed
    assert "## seeds that train" in printed
    environment, line = (tmp_path / "cpu_stability.jsonl").read_text().splitlines()
    assert "cpu" in json.loads(environment)
    assert json.loads(line)["name"] == arms.FIRST
    (tmp_path / "out" / "stability" / "runs" / f"{TINY.name}.json").unlink()
    monkeypatch.setattr(command, "run_all", lambda *_: None)
    with pytest.raises(SystemExit, match="1 results that are missing here"):
        training_command.main(arguments)


def test_options_of_other_experiments_are_refused(tmp_path):
    with pytest.raises(SystemExit, match="--text, --minutes and --scale do not apply"):
        training_command.main(parsed("--only", "stability", "--minutes", "5", "--out", str(tmp_path)))
    with pytest.raises(SystemExit, match="--jobs must be at least 1, got 0"):
        training_command.main(parsed("--only", "stability", "--jobs", "0", "--out", str(tmp_path)))


def in_this_process(work, folder):
    folder.mkdir(parents=True)
    path_of(folder, TINY).write_text(json.dumps(work(TINY)))


def test_letters_do_not_need_the_other_experiment(tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(training_command, "_main", lambda arguments, letters: called.append(letters))
    monkeypatch.setattr(command, "main", lambda *_: called.append("stability"))
    for given in (["--only", "a"], ["--only", "stability", "a"], []):
        training_command.main(parsed("--out", str(tmp_path), *given))
    assert called[:3] == [["a"], "stability", ["a"]]
    assert "stability" not in called[3]
