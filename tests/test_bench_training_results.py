"""bench/training: results, tables, statistics, last words and attentions."""

import json
import math
import sys
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention

import seqwarm_kernels as sw
from bench.training import figures, last_words, plan, results, tables, with_attention
from bench.training.reading import as_demo_records, read_steps, read_validations
from bench.training.running import RunOutcome
from bench.training.scales import TOY
from bench.training.statistics import correlation, count_spikes, mean_and_error, sign_test, spread
from seqwarm_kernels.utils.figures import style
from tests.support.tiers import first_fast

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


def draw(found, folder):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    return figures.draw_all(found, folder, TOY)


def outcome(folder, lines, run, monitor=()):
    write_lines(folder / run.name / "records.jsonl", lines)
    write_lines(folder / run.name / "monitor.jsonl", monitor)
    return RunOutcome(run, folder / run.name, None)


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
    baseline, warmup, lost = (plan.RunPlan(plan.TIME, duration, PEAK, 8, 0) for duration in (0.0, 0.3, 0.6))
    half = plan.RunPlan(plan.TIME, 0.0, PEAK, 4, 0)
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
    baseline, warmup = (plan.RunPlan(plan.TIME, duration, PEAK, 8, 0) for duration in (0.0, 0.3))
    outcomes = [
        outcome(tmp_path, [line(100, 4.0)], baseline),
        outcome(tmp_path, [line(50, 0, diverged=True)], warmup),
    ]
    _, second = results.time_results(outcomes, 256)
    assert second.figures["final_loss"] is None
    assert second.figures["sooner_in_tokens"] is None
    assert results.time_results(outcomes[1:], 256) == []


def test_a_baseline_that_diverged_leaves_its_seed_in_the_table(tmp_path):
    baseline, warmup = (plan.RunPlan(plan.TIME, duration, PEAK, 8, 1) for duration in (0.0, 0.3))
    outcomes = [
        outcome(tmp_path, [line(50, 4.0), line(100, 0, diverged=True)], baseline),
        outcome(tmp_path, [line(50, 3.0), line(100, 2.0)], warmup),
    ]
    found = results.time_results(outcomes, 256)
    assert [r.figures["final_loss"] for r in found] == [None, 2.0]
    assert [r.figures["sooner_in_tokens"] for r in found] == [None, None]
    assert "Seed 1: the baseline diverged" in tables.time_table(found)
    draw(found, tmp_path / "figures")


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
        (factor, duration): plan.RunPlan(plan.STABILITY, duration, PEAK._replace(rate=1e-3 * factor), 8, 0)
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


def test_seeds_that_did_not_reach_the_loss_are_listed():
    found = [timed(0.0, 0, 1.0), timed(0.3, 0, 1.3), timed(0.3, 1, 1.2), timed(0.3, 2, None)]
    text = tables.time_table(found)
    assert "in tokens: 1.25 (1.20 to 1.30), reached in 2 of 3 seeds" in text
    assert "seed 0, which chose the duration: 1.30; the others: 1.20, —" in text
    assert "reached in 0 of 2 seeds" in tables.time_table([timed(0.3, 0, None), timed(0.3, 1, None)])


def test_durations_that_did_not_reach_the_loss_are_drawn():
    support = pytest.importorskip("tests.support.figures")
    with style():
        figure = figures.time_figure([timed(0.0, 0, 1.0), timed(0.3, 0, 1.3), timed(0.6, 0, None)], TOY)
        support.check_readable(figure)
    [missed] = [drawn for drawn in figure.axes[1].lines if drawn.get_label() == "never reached"]
    assert list(missed.get_xdata()) == [0.6]
    assert "never reached" in [text.get_text() for text in figure.axes[1].get_legend().get_texts()]


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
    draw(found, tmp_path)


def test_an_attention_may_lack_a_length(tmp_path):
    def result(attention, stages):
        shown = {"tokens_per_second": 100.0, "by_length": stages, "busy": 0.0, "final_loss": 2.0}
        return results.Result(plan.SPEED, {"attention": attention, "seed": 0}, shown)

    stages = [[32, 100.0, 5], [64, 90.0, 5]]
    found = [result("package", stages[:1]), result("flex", stages), result("eager", [])]
    text = tables.speed_table(found)
    assert "| flex | 100 (100 to 100) | 100 | 90 |" in text
    assert "| package | 100 (100 to 100) | 100 | — |" in text
    assert draw(found, tmp_path)


def test_a_missing_p_is_explained():
    case = {"batch_size": 8, "learning_rate_factor": 1.0, "duration": 0.0, "seed": 0}
    shown = {f"ratio_with_variance_{name}": {"r": 0.5, "p": None, "steps": 9} for name in ("max", "l1")}
    assert "needs scipy" in tables.correlation_table([results.Result(plan.STABILITY, case, shown)])


# ---- statistics


def test_spikes_are_counted_as_the_paper_does():
    ratios = [1.0, 0.9, 1.2, 1.2000001, 5.0, NAN, math.inf]
    assert count_spikes(np.array(ratios)) == sum(not ratio <= 1.2 for ratio in ratios) == 4
    assert count_spikes(np.array(ratios), threshold=2.0) == 3
    assert count_spikes(np.array([])) == 0


def test_correlation_against_its_formula():
    pytest.importorskip("scipy", reason="scipy is not installed")
    generator = np.random.default_rng(0)
    x = generator.normal(size=200)
    y = 0.3 * x + generator.normal(size=200)
    x_gaps, y_gaps = x.copy(), y.copy()
    x_gaps[3], y_gaps[7], y_gaps[11] = NAN, math.inf, NAN
    kept = [index for index in range(200) if index not in (3, 7, 11)]
    for first, second, indices in ((x, y, range(200)), (x_gaps, y_gaps, kept)):
        a, b = x[list(indices)], y[list(indices)]
        a, b = a - a.sum() / len(a), b - b.sum() / len(b)
        r = (a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum())
        found = correlation(first, second)
        assert found.r == pytest.approx(r, rel=1e-9)
        assert found.steps == len(a)
    shuffled = [abs(correlation(x, generator.permutation(y)).r) >= abs(r) for _ in range(2000)]
    assert found.p == pytest.approx(np.mean(shuffled), abs=0.01)
    assert correlation(x, np.ones(200)) is None
    assert correlation(x[:2], y[:2]) is None


def test_without_scipy_only_p_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy", None)
    monkeypatch.setitem(sys.modules, "scipy.stats", None)
    found = correlation(np.array([1.0, 2.0, 4.0, 3.0]), np.array([1.0, 3.0, 4.0, 2.0]))
    assert (found.r, found.p, found.steps) == (pytest.approx(0.8), None, 4)
    assert sign_test([True] * 4, [False] * 4) == 2 / 16


def test_spread():
    assert spread([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    assert spread([1.0, 2.0]).median == 1.5
    with pytest.raises(ValueError, match="at least one number"):
        spread([])


def test_mean_and_error():
    mean, error = mean_and_error([1.0, 2.0, 6.0])
    assert mean == 3.0
    assert error == pytest.approx(math.sqrt((4 + 1 + 9) / 2 / 3))
    assert mean_and_error([1.0]) == (1.0, None)


def test_sign_test_against_the_binomial():
    first = [True] * 9 + [False] * 3 + [True, False] * 10
    second = [False] * 9 + [True] * 3 + [True, False] * 10
    tail = sum(math.comb(12, k) for k in range(9, 13)) / 2**12
    assert sign_test(first, second) == pytest.approx(2 * tail)
    assert sign_test(second, first) == sign_test(first, second)
    assert sign_test(first, first) == 1.0
    with pytest.raises(ValueError, match="same items, got 3 and 2"):
        sign_test([True] * 3, [True] * 2)


# ---- last words

PARAGRAPH = " ".join(["word"] * 25)


def test_items_are_paragraphs_of_prose_that_training_does_not_have():
    document = "\n\n".join(
        [
            "Title\n=====",
            PARAGRAPH.replace(" ", "\n", 5) + " then lemons.",
            "    " + PARAGRAPH + " indented.",
            ".. note:: " + PARAGRAPH + " directive.",
            PARAGRAPH + " known.",
            "Too short a paragraph.",
            PARAGRAPH + " is it.",
            PARAGRAPH + " ends with ``code``.",
            PARAGRAPH + " then pears.",
            PARAGRAPH + " then lemons.",
        ]
    )
    found = last_words.items_of([document], {PARAGRAPH + " known."}, most=9)
    assert found == [
        last_words.Item(PARAGRAPH + " then", " lemons"),
        last_words.Item(PARAGRAPH + " then", " pears"),
    ]
    assert last_words.items_of([document, document], set(), most=1) == found[:1]
    with pytest.raises(ValueError, match="paragraphs of prose"):
        last_words.items_of(["nothing"], set(), most=9)


class Bytes:
    """A tokenizer of bytes."""

    def encode(self, text):
        return SimpleNamespace(ids=list(text.encode()))


class Table(nn.Module):
    """Scores for the next token by this one alone."""

    def __init__(self):
        super().__init__()
        self.scores = nn.Parameter(torch.randn(256, 256))

    def forward(self, input_ids):
        return self.scores[input_ids]


def test_last_words_are_scored_token_by_token():
    model = Table()
    with torch.no_grad():
        for a, b in pairwise(b"n fox jumps"):
            model.scores[a, b] = 50.0
        model.scores[ord(" "), ord("f")] = 49.0  # after a space j is the first choice: no word with f is right
    items = [
        last_words.Item("the quick brown", " fox"),
        last_words.Item("he sees the fox", " jumps"),
        last_words.Item("a context that is longer than others: fox", " jumpy"),
        last_words.Item("brown", " jumps"),
    ]
    logs = torch.log_softmax(model.scores.double(), dim=-1)
    for batch_size in (1, 2, 16):
        found = last_words.score(model, Bytes(), items, device=torch.device("cpu"), batch_size=batch_size)
        assert found.right == [False, True, False, True]
        for item, nats in zip(items, found.nats, strict=True):
            pairs = pairwise((item.context[-1] + item.word).encode())
            assert nats == pytest.approx(-sum(logs[a, b].item() for a, b in pairs), rel=1e-4)

    def stop():
        raise TimeoutError

    with pytest.raises(TimeoutError):
        last_words.score(model, Bytes(), items, device=torch.device("cpu"), check=stop)
    assert found.accuracy == 0.5
    assert found.perplexity == pytest.approx(math.exp(np.mean(found.nats)))


# ---- attention


@pytest.mark.parametrize("causal", first_fast([True, False]))
def test_attentions_agree(causal):
    slopes = sw.alibi_slopes(4)
    flex = with_attention.Flex()
    flex._attention = flex_attention  # compiling takes long, and changes nothing
    for attention in (with_attention.Eager(), flex):
        for length in (40, 17):
            query, key, value = torch.randn(3, 2, 4, length, 16)
            expected = sw.alibi_attention(query, key, value, slopes, causal=causal)
            out = attention(query, key, value, slopes, causal=causal)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_slicing_is_what_resize_does():
    scheduler = sw.SequenceLengthScheduler(8, 32, duration=100)
    batch = {name: torch.arange(64).view(2, 32) for name in ("input_ids", "labels")}
    by_hand = with_attention.slice_batch(scheduler, batch)
    for name, tensor in scheduler.resize(batch).items():
        assert torch.equal(by_hand[name], tensor)


@pytest.mark.parametrize(
    ("lengths", "shown"), [([], []), (range(8, 257, 8), [8, 16, 32, 64, 128, 256]), ([128, 384, 256], [128, 384])]
)
def test_tables_of_long_ramps_show_some_lengths(lengths, shown):
    assert results.shown_lengths(lengths) == shown
