"""python -m seqwarm_kernels plan: lengths, tokens and FLOPs against a loop over the steps."""

import functools
import itertools
import json

import pytest

from seqwarm_kernels import SequenceLengthScheduler, cyclic, discrete, root
from seqwarm_kernels.cli import main
from seqwarm_kernels.cli.exchanges import ContextSize, Exchanges, normal_widths
from seqwarm_kernels.cli.schedule_plan import ModelSize, plan_schedule
from seqwarm_kernels.utils.figures import style

MODEL = ModelSize(layers=2, hidden_size=16, vocab_size=100)


def by_hand(scheduler, total, batch_size):
    """(progress, length, steps, tokens) of each run of steps of one length, from stepping the scheduler."""
    stages = []
    while scheduler.progress < total:
        length = scheduler.seq_length
        if not stages or stages[-1][1] != length:
            stages.append([scheduler.progress, length, 0, 0])
        stages[-1][2] += 1
        stages[-1][3] += batch_size * length
        scheduler.step({"step": 1, "token": batch_size * length, "sample": batch_size}[scheduler.unit])
    return stages


@pytest.mark.parametrize("unit", ["step", "token", "sample"])
@pytest.mark.parametrize("pacing", [root(2), cyclic("linear", 3), discrete([(70, 8), (1, 40), (2, 48)])])
def test_the_plan_is_that_of_stepping_the_scheduler(unit, pacing):
    """Also where a step ends after the next milestone, or after several."""
    make = functools.partial(SequenceLengthScheduler, 8, 64, duration=500, pacing=pacing, unit=unit)
    for batch_size, total in itertools.product((1, 32), (1, 137, 499, 500, 4001)):
        stages = by_hand(make(), total, batch_size)
        plan = plan_schedule(make(), total, batch_size, MODEL)
        assert [[stage.progress, stage.seq_length, stage.steps, stage.tokens] for stage in plan.stages] == stages
        tokens, steps = (sum(stage[place] for stage in stages) for place in (3, 2))
        assert (plan.tokens, plan.tokens_full_length) == (tokens, steps * batch_size * 64)
        assert plan.tokens_saved() == 1 - tokens / (steps * batch_size * 64)
        assert plan.attention_flops == sum(6 * 2 * 16 * length * tokens for _, length, _, tokens in stages)


def test_no_ramp_saves_nothing():
    plan = plan_schedule(SequenceLengthScheduler(8, 64, duration=0), 10, 2, MODEL)
    assert (plan.tokens_saved(), plan.attention_saved()) == (0, 0)
    assert plan.flops == plan.flops_full_length == 10 * 2 * 64 * (6 * (12 * 2 * 256 + 1600) + 6 * 2 * 16 * 64)


def three_stages(unit="sample"):
    """12,000 tokens of length 8, 24,000 of length 16 and 50,400 of length 24, in batches of 300 rows."""
    ramp, total = {"token": (36_000, 86_400), "sample": (3000, 5100)}[unit]
    pacing = discrete([(12_000, 8), (24_000, 16)]) if unit == "token" else "linear"
    scheduler = SequenceLengthScheduler(8, 24, duration=ramp, step_size=8, pacing=pacing, unit=unit)
    return plan_schedule(scheduler, total, 300, MODEL)


def test_table():
    assert (
        three_stages().table()
        == """\
        sample    length    of all tokens so far
             0         8                    0.0%
         1,500        16                   13.9%
         3,000        24                   41.7%

model      2 layers, hidden size 16, vocabulary 100: 0.0 M parameters
steps      17
tokens     8.64e+04, 29.4% fewer than as many steps at full length
training   4.339e+09 FLOPs of this model, 30.6% fewer
attention  3.244e+08 of these FLOPs, 18.5% fewer than for the same tokens at full length"""
    )


def test_a_long_plan_is_thinned_out():
    plan = plan_schedule(SequenceLengthScheduler(8, 1024, duration=1000), 3000, 2, MODEL)
    lines = plan.table().splitlines()
    assert len(plan.stages) == 128
    assert len(lines) == 1 + 12 + 6
    assert [line.split() for line in (lines[1], lines[2], lines[11], lines[12])] == [
        ["0", "8", "0.0%"],
        ["95", "104", "0.2%"],
        ["906", "928", "16.4%"],
        ["1,000", "1,024", "20.0%"],
    ]
    plan = plan_schedule(SequenceLengthScheduler(1, 12, duration=12, step_size=1), 20, 2, MODEL)
    assert [line.split()[1] for line in plan.table().splitlines()[1:13]] == [str(length) for length in range(1, 13)]


def test_json():
    plan = json.loads(json.dumps(three_stages().to_json()))
    assert plan["stages"][1] == {"progress": 1500, "seq_length": 16, "steps": 5, "tokens": 24_000}
    assert (plan["tokens"], plan["tokens_full_length"]) == (86_400, 122_400)
    assert (plan["attention_flops"], plan["attention_flops_same_tokens"]) == (324_403_200, 398_131_200)
    assert plan["tokens_saved"] == pytest.approx(36 / 122.4)
    assert plan["attention_saved"] == pytest.approx(1 - 324_403_200 / 398_131_200)
    assert plan["model"] == {"layers": 2, "hidden_size": 16, "vocab_size": 100}


@pytest.mark.parametrize("unit", ["sample", "token"])
def test_figure(unit):
    support = pytest.importorskip("tests.support.figures")
    plan = three_stages(unit)
    with style():
        figure = plan.figure()
        support.check_readable(figure)
        support.check_looks(figure, {"full length throughout", "sequence-length warmup"})
    lengths, amounts = map(support.drawn, figure.axes)
    end = {"token": 86_400, "sample": 5100}[unit]
    starts = [stage.progress for stage in plan.stages]
    assert lengths == {
        "full length throughout": [(0, 24), (end, 24)],
        "sequence-length warmup": list(zip([*starts, end], [8, 16, 24, 24], strict=True)),
    }
    full, sums = {"token": (12, [0, 5, 10, 17]), "sample": (122_400, [0, 12_000, 36_000, 86_400])}[unit]
    assert amounts["full length throughout"] == [(0, 0), (end, pytest.approx(full))]
    assert [y for _, y in amounts["sequence-length warmup"]] == sums
    assert figure.axes[1].get_ylabel() == ("optimizer steps so far" if unit == "token" else "tokens so far")


def test_the_command(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    figure = tmp_path / "new" / "plan.png"
    assert main(["plan", "--duration", "300", "--root", "2", "--figure", str(figure)]) == 0
    assert "fewer than as many steps at full length" in capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "--duration", "60000000", "--unit", "token", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    stages = by_hand(SequenceLengthScheduler(duration=60_000_000, unit="token"), 200_000_000, 32)
    assert sum(stage["steps"] for stage in plan["stages"]) == sum(stage[2] for stage in stages)
    assert plan["unit"] == "token"
    assert "exchanges" not in plan, "without --ranks"


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
    for more, head_dim, score_std in (([], 16, 1), (["--head-dim", "8", "--score-std", "2"], 8, 2)):
        size = ContextSize(4, 2, head_dim, 4096, 4)
        expected = Exchanges(size, normal_widths(size, score_std=score_std))
        assert main([*arguments, *more, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["exchanges"]
        assert {name: found[name] for name in expected.to_json()} == json.loads(json.dumps(expected.to_json()))
        assert main([*arguments, *more]) == 0
        assert capsys.readouterr().out.rstrip().endswith(expected.table())
