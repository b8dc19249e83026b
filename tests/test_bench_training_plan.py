"""bench/training: the runs of each scale, and their flags for the script."""

import math
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import seqwarm_kernels as sw

pytest.importorskip("tokenizers", reason="tokenizers is not installed")

from bench.training import plan
from bench.training.running import load_script
from bench.training.scales import H200, SCALES, TOY

PEAK = plan.Peak(1e-3, 0.05)


def all_runs(scale):
    return {
        "sweep": plan.sweep_runs(scale),
        "a": [*plan.duration_runs(scale, PEAK), *plan.best_duration_runs(scale, PEAK, 0.45, 3)],
        "b": plan.stability_runs(scale, plan.Peak(scale.learning_rates[1], 0.05)),
        "c": plan.extrapolation_runs(scale, PEAK, 3),
        "d": plan.speed_runs(scale),
        "e": plan.constant_token_runs(scale, 3),
    }


def test_loading_the_script_does_not_replace_other_modules(monkeypatch):
    script, other = load_script(), ModuleType("text")
    for name, module in vars(script).items():
        monkeypatch.setitem(sys.modules, f"train_gpt2_{name}", module)  # restored afterwards
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "text", other)
    again = load_script.__wrapped__()
    assert again.train.UserError is again.text.UserError is again.model.UserError is not script.model.UserError
    assert sys.modules["text"] is other
    assert not {"model", "train"} & sys.modules.keys()


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_the_script_takes_every_run(scale):
    settings = load_script().model
    for runs in all_runs(scale).values():
        assert len({run.name for run in runs}) == len(runs)
        for run in runs:
            given = settings.parse(run.arguments(scale, [Path("corpus")], Path("out")))
            assert given.out == Path("out/runs") / run.name
            config = settings.configure(SimpleNamespace(**{**vars(given), "out": Path("nowhere")}))
            assert (config.learning_rate, config.batch_size, config.seed) == (
                run.peak.rate, run.batch_size, run.seed,
            )  # fmt: skip
            assert (config.total_tokens, config.seq_length) == (scale.total_tokens, scale.seq_length)
            assert (config.warmup_duration, config.objective, config.size) == (
                run.duration, run.objective, scale.size,
            )  # fmt: skip
            assert config.batch_size % config.micro_batch_size == 0
            assert config.constant_tokens == (run.tokens != plan.TRUNCATED)
            assert config.scale_learning_rate == (run.tokens == plan.SCALED)
            assert config.validation_tokens % max(config.validation_lengths) == 0
            assert config.min_seq_length < config.seq_length


def test_what_varies():
    scale = TOY
    runs = all_runs(scale)
    assert {run.duration for run in runs["sweep"]} == {0.0}
    assert {run.duration for run in runs["a"] if run.seed == 0} == {0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9}
    full = [run for run in runs["a"] if run.batch_size == scale.batch_size]
    assert sorted((run.duration, run.seed) for run in full if run.seed) == [(0, 1), (0, 2), (0.45, 1), (0.45, 2)]
    half = [run for run in runs["a"] if 2 * run.batch_size == scale.batch_size]
    assert sorted((run.duration, run.seed) for run in half) == [(0, 0), (0, 1), (0, 2)]
    for batch in {run.batch_size for run in runs["b"]}:
        pairs = [(run.peak.rate, run.duration) for run in runs["b"] if run.batch_size == batch and run.seed == 0]
        rates = [scale.learning_rates[1] * factor for factor in (1, 2, 4, 8)]
        assert sorted(pairs) == sorted((rate, duration) for rate in rates for duration in (0.0, scale.duration))
    assert [run.objective for run in runs["c"]].count("masked") == 2
    assert {run.attention for run in runs["d"]} == {"package", "eager", "flex"}
    arms = [("truncated", 0), ("truncated", 0.9), ("constant", 0.9), ("constant-scaled", 0.9)]
    arms += [("truncated", 0.3), ("constant", 0.3), ("constant-scaled", 0.3)]
    of_full = [(run.tokens, run.duration, run.seed) for run in runs["e"] if run.batch_size == scale.batch_size]
    assert sorted(of_full) == sorted((*arm, seed) for arm in arms for seed in range(3))
    assert {run.peak for run in runs["e"]} == {plan.Peak(4e-3, 0.17)}  # that of (a)
    of_half = [(run.tokens, run.duration, run.seed) for run in runs["e"] if run.batch_size < scale.batch_size]
    arms = [("truncated", 0), ("constant", 0.9)]
    assert sorted(of_half) == sorted((*arm, seed) for arm in arms for seed in range(3))


def test_the_plan_for_a_gpu_fits_into_half_an_hour():
    """At a guessed speed, with time for the start of each process, and with the runs it needs at least."""
    peak = plan.Peak(H200.learning_rates[1], H200.lr_warmup_shares[-1])
    runs = all_runs(H200)
    runs["c"] = plan.extrapolation_runs(H200, peak, 3, best=0.9)
    runs["a"] = [*plan.duration_runs(H200, peak), *plan.best_duration_runs(H200, peak, 0.9, 3)]
    runs["b"] = plan.stability_runs(H200, peak)
    del runs["e"]  # not part of this plan
    names = {run.name for found in runs.values() for run in found}
    assert len(names) == 23  # as docs/benchmarks/experiments.md says
    assert len(names) * (H200.total_tokens / 0.7e6 + 15) < 22 * 60
    timed = {(run.duration, run.seed) for run in runs["a"] if run.batch_size == H200.batch_size}
    assert {(duration, seed) for duration in (0.0, 0.9) for seed in range(3)} <= timed
    pairs = [(run.duration, run.peak.rate / peak.rate) for run in runs["b"]]
    assert sorted(pairs) == [(0.0, 1), (0.0, 4), (0.3, 1), (0.3, 4)]
    assert {run.attention for run in runs["d"]} == {"package", "eager", "flex"}
    assert (len({run.peak.rate for run in runs["sweep"]}), len(runs["sweep"])) == (3, 3)


def test_the_speed_is_measured_near_the_middle_of_the_rates():
    assert {run.peak for run in plan.speed_runs(TOY)} == {plan.Peak(4e-3, 0.17)}  # that of the records
    assert {run.peak.rate for run in plan.speed_runs(replace(TOY, learning_rates=(1e-3,)))} == {1e-3}


def test_on_a_gpu_the_timed_runs_are_extrapolated():
    causal = [run for run in plan.extrapolation_runs(H200, PEAK, 3, best=0.9) if run.objective == plan.CAUSAL]
    timed = [*plan.duration_runs(H200, PEAK), *plan.best_duration_runs(H200, PEAK, 0.9, 3)]
    assert {run.name for run in causal} <= {run.name for run in timed}
    given = load_script().model.parse(causal[0].arguments(H200, [Path("corpus")], Path("out")))
    assert given.validation_lengths == [1024, 2048, 4096]
    assert all(run.keeps_model for run in causal)
    alone = [run for run in plan.extrapolation_runs(TOY, PEAK, 1) if run.objective == plan.CAUSAL]
    assert {run.experiment for run in alone} == {plan.EXTRAPOLATION}


def test_the_sweep_is_part_of_stability():
    shared = {run.name for run in plan.sweep_runs(TOY)} & {
        run.name for run in plan.stability_runs(TOY, plan.Peak(4e-3, 0.17))
    }
    assert len(shared) == 3 * TOY.stability_seeds
    timed = {run.name for run in plan.duration_runs(TOY, plan.Peak(4e-3, 0.17))}
    assert timed.isdisjoint(run.name for run in plan.stability_runs(TOY, plan.Peak(4e-3, 0.17)))


@pytest.mark.parametrize("scale", [TOY, H200], ids=lambda scale: scale.name)
def test_each_length_of_the_ramp_trains_between_two_validations(scale):
    run = plan.speed_runs(scale)[0]
    duration = run.duration * scale.total_tokens
    smallest, step = scale.ramp_min_seq_length, scale.ramp_step_size
    scheduler = sw.SequenceLengthScheduler(smallest, scale.seq_length, duration=duration, step_size=step, unit="token")
    share = 1 / plan.ramp_validations(scale)
    points = [index * share * scale.total_tokens for index in range(plan.ramp_validations(scale) + 1)]
    lengths = [{scheduler.seq_length_at(a + 2), scheduler.seq_length_at(b - 2)} for a, b in pairwise(points)]
    assert all(len(found) == 1 for found in lengths)
    assert {length for found in lengths for length in found} == set(range(smallest, scale.seq_length + 1, step))


@pytest.mark.parametrize("is_constant", [False, True])
@pytest.mark.parametrize(("duration", "batch_size"), [(0.0, 8), (0.3, 8), (0.9, 8), (0.3, 32)])
def test_the_learning_rate_peaks_after_the_same_tokens(duration, batch_size, is_constant):
    tokens_of_a_step = plan.CONSTANT if is_constant else plan.TRUNCATED
    run = plan.RunPlan(plan.TOKENS, duration, plan.Peak(1e-3, 0.1), batch_size, 0, tokens=tokens_of_a_step)
    lengths, tokens = [], 0
    while tokens < 0.1 * TOY.total_tokens:  # step by step, by the formula of linear pacing
        way = min(1, tokens / (duration * TOY.total_tokens)) if duration else 1
        lengths.append(min(256, 32 + 8 * math.floor((256 - 32) * way / 8)))
        rows = batch_size * 256 // lengths[-1] if is_constant else batch_size
        tokens += rows * lengths[-1]
    assert run.lr_warmup_steps(TOY) == len(lengths)
