"""python -m seqwarm_kernels plan: lengths, tokens and FLOPs against a loop over the steps."""

import itertools
import json

import pytest

from seqwarm_kernels import SequenceLengthScheduler, discrete
from seqwarm_kernels.cli import main
from seqwarm_kernels.cli.exchanges import ContextSize, Exchanges, normal_widths
from seqwarm_kernels.cli.plan_report import plan_figure, table
from seqwarm_kernels.cli.schedule_plan import ModelSize, plan_schedule
from seqwarm_kernels.utils.figures import style

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


def test_a_run_that_ends_where_the_length_changes():
    plan = plan_schedule(SequenceLengthScheduler(8, 24, duration=10, step_size=8), 10, 1, MODEL)
    assert [(stage.progress, stage.seq_length, stage.steps) for stage in plan.stages] == [(0, 8, 5), (5, 16, 5)]


def test_no_ramp_saves_nothing():
    plan = plan_schedule(SequenceLengthScheduler(8, 64, duration=0), 10, 2, MODEL)
    assert (plan.tokens_saved(), plan.attention_saved()) == (0, 0)
    assert plan_schedule(SequenceLengthScheduler(8, 64, duration=0), 1, 2, MODEL).tokens == 2 * 64
    assert plan.flops == plan.flops_full_length == 10 * 2 * 64 * (6 * (12 * 2 * 256 + 1600) + 6 * 2 * 16 * 64)


def three_stages(unit="sample"):
    """12,000 tokens of length 8, 24,000 of length 16 and 48,000 of length 24, in batches of 300 rows."""
    ramp, total = {"step": (10, 17), "token": (36_000, 84_000), "sample": (3000, 5000)}[unit]
    pacing = discrete([(12_000, 8), (24_000, 16)]) if unit == "token" else "linear"
    scheduler = SequenceLengthScheduler(8, 24, duration=ramp, step_size=8, pacing=pacing, unit=unit)
    return plan_schedule(scheduler, total, 300, MODEL)


def test_table():
    assert (
        table(three_stages())
        == """\
        sample    length    of all tokens so far
             0         8                    0.0%
         1,500        16                   14.3%
         3,000        24                   42.9%

model      2 layers, hidden size 16, vocabulary 100: 0.0 M parameters
steps      17
tokens     8.4e+04, 30.0% fewer than as many steps at full length
training   4.216e+09 FLOPs of this model, 31.2% fewer
attention  3.133e+08 of these FLOPs, 19.0% fewer than for the same tokens at full length"""
    )


def test_a_long_plan_is_thinned_out():
    plan = plan_schedule(SequenceLengthScheduler(8, 1024, duration=1000), 3000, 2, MODEL)
    lines = table(plan).splitlines()
    assert len(plan.stages) == 128
    assert len(lines) == 1 + 12 + 6
    assert [line.split() for line in (lines[1], lines[2], lines[11], lines[12])] == [
        ["0", "8", "0.0%"],
        ["95", "104", "0.2%"],
        ["906", "928", "16.4%"],
        ["1,000", "1,024", "20.0%"],
    ]
    plan = plan_schedule(SequenceLengthScheduler(1, 12, duration=12, step_size=1), 20, 2, MODEL)
    assert [line.split()[1] for line in table(plan).splitlines()[1:13]] == [str(length) for length in range(1, 13)]


def test_json():
    plan = json.loads(json.dumps(three_stages().to_json()))
    assert plan["stages"][1] == {"progress": 1500, "seq_length": 16, "steps": 5, "tokens": 24_000}
    assert (plan["tokens"], plan["tokens_full_length"]) == (84_000, 120_000)
    assert (plan["attention_flops"], plan["attention_flops_same_tokens"]) == (313_344_000, 387_072_000)
    assert plan["tokens_saved"] == pytest.approx(0.3)
    assert plan["attention_saved"] == pytest.approx(1 - 313_344_000 / 387_072_000)
    assert plan["model"] == {"layers": 2, "hidden_size": 16, "vocab_size": 100}


def test_numbers_below_1():
    with pytest.raises(ValueError, match="hidden_size must be at least 1, got 0"):
        ModelSize(2, 0, 100)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        plan_schedule(SequenceLengthScheduler(duration=10), 10, 0, MODEL)


@pytest.mark.parametrize("unit", ["step", "token", "sample"])
def test_figure(unit):
    support = pytest.importorskip("tests.support.figures")
    plan = three_stages(unit)
    with style():
        figure = plan_figure(plan)
        support.check_readable(figure)
        support.check_looks(figure, {"full length throughout", "sequence-length warmup"})
    lengths, amounts = figure.axes
    end = {"step": 17, "token": 84_000, "sample": 5000}[unit]
    starts = [stage.progress for stage in plan.stages]
    assert support.drawn(lengths) == {
        "full length throughout": [(0, 24), (end, 24)],
        "sequence-length warmup": list(zip([*starts, end], [8, 16, 24, 24], strict=True)),
    }
    assert {line.get_drawstyle() for line in lengths.lines} == {"steps-post"}
    assert {line.get_marker() for axes in figure.axes for line in axes.lines} == {"none"}, "stages are no points"
    of_stages = [stage.steps if unit == "token" else stage.tokens for stage in plan.stages]
    (origin, (last, full)) = support.drawn(amounts)["full length throughout"]
    assert (origin, last) == ((0, 0), end)
    steps = sum(stage.steps for stage in plan.stages)
    assert full == pytest.approx(
        steps * 84_000 / plan.tokens_full_length if unit == "token" else plan.tokens_full_length
    )
    assert [y for _, y in support.drawn(amounts)["sequence-length warmup"]] == pytest.approx(
        [0, *itertools.accumulate(of_stages)]
    )
    assert amounts.get_ylabel() == ("optimizer steps so far" if unit == "token" else "tokens so far")
    assert amounts.get_xlabel() == f"{unit}s"
    assert lengths.get_xlim() == amounts.get_xlim() == (0, end)
    assert lengths.get_ylabel() == "sequence length (tokens)"
    assert lengths.get_ylim()[0] == amounts.get_ylim()[0] == 0


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


def test_a_run_that_ends_before_the_full_length_is_a_warning(capsys):
    assert main(["plan", "--duration", "300", "--total", "299", "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["stages"]
    assert "warning: the run of 299 steps ends before the full length, which --duration sets to 300" in printed.err
    assert main(["plan", "--duration", "300", "--total", "300"]) == 0
    assert capsys.readouterr().err == ""


def test_what_ranks_exchange(capsys):
    arguments = ["plan", "--duration", "300", "--batch-size", "1", "--max-seq-length", "4096", "--ranks", "4"]
    arguments += ["--hidden-size", "64", "--heads", "4", "--key-heads", "2"]
    assert main([*arguments, "--json"]) == 0
    exchanges = json.loads(capsys.readouterr().out)["exchanges"]
    size = ContextSize(4, 2, 16, 4096, 4)
    widths = normal_widths(size)
    assert exchanges["halo_widths"] == widths
    assert exchanges["bytes_received"]["halo"] == size.halo(widths)._asdict()
    assert exchanges["bytes_received"]["ring"] == size.ring()._asdict()
    assert exchanges["bytes_received"]["Ulysses"] == {
        "not_possible": "key_heads must be a multiple of the 4 ranks, got 2"
    }
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert "fewer than as many steps at full length" in printed
    assert printed.rstrip().endswith(Exchanges(size, tuple(widths)).table())
    assert main([*arguments, "--head-dim", "8", "--score-std", "2", "--json"]) == 0
    exchanges = json.loads(capsys.readouterr().out)["exchanges"]
    assert exchanges["head_dim"] == 8
    assert exchanges["halo_widths"] == normal_widths(ContextSize(4, 2, 8, 4096, 4), score_std=2)


def test_without_ranks_nothing_is_exchanged(capsys):
    assert main(["plan", "--duration", "300", "--json"]) == 0
    assert "exchanges" not in json.loads(capsys.readouterr().out)


def test_bad_total():
    with pytest.raises(ValueError, match="total must be at least 1 step, got 0"):
        plan_schedule(SequenceLengthScheduler(8, 64, duration=10), 0, 1, MODEL)
