"""python -m seqwarm_kernels plan: lengths, tokens and FLOPs against a loop over the steps."""

import json

import pytest

from seqwarm_kernels import SequenceLengthScheduler
from seqwarm_kernels.cli import main
from seqwarm_kernels.schedule.plan import ModelSize, plan_schedule, table

MODEL = ModelSize(layers=2, hidden_size=16, vocab_size=100)


def by_hand(scheduler, total, batch_size):
    """Step by step."""
    tokens = attention = steps = 0
    progress = 0
    while progress < total:
        length = scheduler.seq_length_at(progress)
        tokens += batch_size * length
        attention += batch_size * length * 6 * 2 * 16 * length
        steps += 1
        progress += {"step": 1, "token": batch_size * length, "sample": batch_size}[scheduler.unit]
    return tokens, attention, steps


@pytest.mark.parametrize(
    ("unit", "duration", "total"), [("step", 30, 100), ("sample", 300, 999), ("token", 5000, 60000)]
)
def test_against_a_loop(unit, duration, total):
    scheduler = SequenceLengthScheduler(8, 64, duration=duration, step_size=8, unit=unit)
    plan = plan_schedule(scheduler, total, 3, MODEL)
    tokens, attention, steps = by_hand(scheduler, total, 3)
    tolerance = 0 if unit == "step" else 0.02  # a step that crosses a change is split
    assert plan.tokens == pytest.approx(tokens, rel=tolerance)
    assert plan.attention_flops == pytest.approx(attention, rel=tolerance)
    assert sum(stage.steps for stage in plan.stages) == pytest.approx(steps, rel=tolerance)
    assert plan.tokens_saved() == pytest.approx(1 - tokens / (steps * 3 * 64), abs=0.02)
    assert [stage.seq_length for stage in plan.stages] == [8, 16, 24, 32, 40, 48, 56, 64]


def test_a_run_that_ends_inside_the_ramp():
    plan = plan_schedule(SequenceLengthScheduler(8, 64, duration=100, step_size=8), 50, 1, MODEL)
    assert plan.stages[-1].seq_length < 64
    assert sum(stage.steps for stage in plan.stages) == 50


def test_no_ramp_saves_nothing():
    plan = plan_schedule(SequenceLengthScheduler(8, 64, duration=0), 10, 2, MODEL)
    assert (plan.tokens_saved(), plan.attention_saved()) == (0, 0)
    assert plan.flops == plan.flops_full_length == 10 * 2 * 64 * (6 * (12 * 2 * 256 + 1600) + 6 * 2 * 16 * 64)


def test_a_long_plan_is_thinned_out():
    plan = plan_schedule(SequenceLengthScheduler(8, 1024, duration=1000), 3000, 2, MODEL)
    lines = table(plan).splitlines()
    assert len(plan.stages) == 128
    assert len(lines) == 1 + 12 + 5
    assert lines[1].split() == ["0", "8", "0.0%"]
    assert lines[12].split()[:2] == ["1,000", "1,024"]


def test_the_command(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "plan.png"
    assert main(["plan", "--duration", "300", "--root", "2", "--figure", str(figure)]) == 0
    printed = capsys.readouterr().out
    assert "fewer than as many steps at full length" in printed
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--duration", "300", "--unit", "token", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["unit"] == "token"
    assert 0 < plan["attention_saved"] < 1


def test_bad_total():
    with pytest.raises(ValueError, match="total must be at least 1 step, got 0"):
        plan_schedule(SequenceLengthScheduler(8, 64, duration=10), 0, 1, MODEL)
