from dataclasses import replace

import pytest
import torch

from seqwarm_kernels.demo.model import build_model
from seqwarm_kernels.demo.records import BASELINE, RUNS, WARMUP
from seqwarm_kernels.demo.settings import QUICK_CPU
from seqwarm_kernels.demo.text import read_corpus
from seqwarm_kernels.demo.training import Trainer, learning_rate, make_scheduler

TINY = replace(QUICK_CPU, steps=6, seq_length=40, batch_size=3, layers=2, heads=2, width=16, validation_windows=4)


@pytest.fixture
def corpus(text_file):
    return read_corpus((str(text_file),), TINY.seq_length)


def trainer_of(run, corpus):
    return Trainer(run, TINY, corpus, make_scheduler(run, TINY))


def test_learning_rate_rises_then_falls_by_tokens():
    total = TINY.total_tokens
    warm = round(TINY.learning_rate_warmup * total)
    assert learning_rate(0, TINY) == 0
    assert learning_rate(warm, TINY) == pytest.approx(TINY.peak_learning_rate)
    assert learning_rate(warm // 2, TINY) == pytest.approx(TINY.peak_learning_rate * (warm // 2) / warm)
    middle = round((warm + total) / 2)
    assert learning_rate(middle, TINY) == pytest.approx(TINY.peak_learning_rate / 2, rel=1e-2)
    assert learning_rate(total, TINY) == pytest.approx(0, abs=1e-12)


def test_both_runs_differ_in_nothing_but_the_length(corpus):
    trainers = [trainer_of(run, corpus) for run in RUNS]
    baseline, warmup = (trainer.model.state_dict() for trainer in trainers)
    assert all(torch.equal(baseline[name], warmup[name]) for name in baseline)
    points, found = TINY.evaluation_points(), [list(trainer.train()) for trainer in trainers]
    assert (points[0], points[-1]) == (0, TINY.total_tokens) == (0, 6 * 3 * 40)
    for trainer, records in zip(trainers, found, strict=True):
        late = [record.tokens - point for record, point in zip(records, points, strict=True)]
        assert all(0 <= tokens < 3 * 40 for tokens in late)
        assert late[-1] == 0, "both end on the same token"
        assert [record.learning_rate for record in records] == [learning_rate(each.tokens, TINY) for each in records]
        assert trainer.optimizer.param_groups[0]["lr"] == learning_rate(TINY.total_tokens, TINY)
    of_baseline, of_warmup = found
    assert of_baseline[-1].step == TINY.steps < of_warmup[-1].step
    assert {record.seq_length for record in of_baseline} == {40}
    assert (of_warmup[0].seq_length, of_warmup[-1].seq_length) == (8, 40)


def test_warm_allocator_runs_every_length_of_the_schedule(corpus):
    assert trainer_of(BASELINE, corpus).warm_allocator().lengths == (40,)
    assert trainer_of(WARMUP, corpus).warm_allocator().lengths == (40, 8, 16, 24, 32)


def test_seconds_do_not_include_evaluation(corpus, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("seqwarm_kernels.demo.training.time.perf_counter", lambda: next(clock))
    assert [record.seconds for record in trainer_of(BASELINE, corpus).train()] == [1, 2, 3, 4, 5, 6, 7]


def test_the_model_is_causal():
    model = build_model(layers=2, heads=2, width=16, seed=0, device="cpu")
    tokens = torch.randint(256, (1, 12))
    changed = tokens.clone()
    changed[0, 8:] = 7
    assert torch.equal(model(tokens)[:, :8], model(changed)[:, :8])
    assert not torch.equal(model(tokens)[:, 8:], model(changed)[:, 8:])
