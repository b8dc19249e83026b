"""bench/training: statistics, last words and attentions against plain computations."""

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
from bench.training import last_words, with_attention
from bench.training.statistics import correlation, count_spikes, mean_and_error, sign_test, spread

NAN = math.nan


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


@pytest.mark.parametrize("causal", [True, False])
def test_attentions_agree(causal):
    slopes = sw.alibi_slopes(4)
    flex = with_attention.Flex()
    flex._attend = flex_attention  # compiling takes long, and changes nothing
    for attend in (with_attention.Eager(), flex):
        for length in (40, 17):
            query, key, value = torch.randn(3, 2, 4, length, 16)
            expected = sw.alibi_attention(query, key, value, slopes, causal=causal)
            out = attend(query, key, value, slopes, causal=causal)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_slicing_is_what_resize_does():
    scheduler = sw.SequenceLengthScheduler(8, 32, duration=100)
    batch = {name: torch.arange(64).view(2, 32) for name in ("input_ids", "labels")}
    by_hand = with_attention.slice_batch(scheduler, batch)
    for name, tensor in scheduler.resize(batch).items():
        assert torch.equal(by_hand[name], tensor)
