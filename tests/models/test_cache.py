"""The cache under each of its names, and what the verification finds about it."""

import inspect

import pytest
import torch

from seqwarm_kernels import apply_alibi

from .zoo import CACHED, WIDTH, make, tokens, transformers


def name_of_cache(model):
    return next(name for name in ("cache", "past_key_values") if name in inspect.signature(model.forward).parameters)


def attention_of(model):
    return next(module for module in model.modules() if hasattr(module, "alibi"))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_attention_of_mpt_takes_both_names(name):
    model = make("mpt", torch.float64)
    apply_alibi(model, 64)
    attention, cache = attention_of(model), transformers.DynamicCache()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    attention(x[:, :5], None, **{name: cache})
    out, _ = attention(x[:, 5:], None, **{name: cache})
    torch.testing.assert_close(out, attention(x, None)[0][:, 5:])


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_a_keyword_without_a_meaning_is_refused(name):
    model = make(name)
    apply_alibi(model, 64)
    with pytest.raises(TypeError, match="'renamed'"):
        attention_of(model)(torch.zeros(1, 3, WIDTH), renamed=None)


@pytest.mark.parametrize("name", CACHED)
def test_a_model_that_ignores_its_cache_is_refused(name, monkeypatch):
    for kind in (transformers.cache_utils.DynamicLayer, transformers.cache_utils.DynamicSlidingWindowLayer):
        monkeypatch.setattr(kind, "update", lambda self, key, value, *args, **kwargs: (key, value))
    model = make(name, torch.bfloat16)  # the largest tolerance
    with pytest.raises(ValueError, match="cache"):
        apply_alibi(model, 64)
    assert not any(hasattr(module, "alibi") for module in model.modules())


@pytest.mark.parametrize("name", ["llama", "mpt", "bert_decoder"])
def test_the_verification_leaves_the_model_as_it_was(name):
    model = make(name).train()
    model.config.use_cache = False
    assert apply_alibi(model, 64).verification.cache_error < 1e-5
    assert model.training
    assert model.config.use_cache is False


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "modernbert"])
def test_an_encoder_keeps_no_cache(name):
    report = apply_alibi(make(name), 64)
    assert report.verification.cache_error is None
    assert "cache" not in str(report)


@torch.no_grad()
def test_positions_after_a_cache_tell_no_packed_sequences():
    model, ids = make("llama", torch.float64), tokens(1, 12)
    apply_alibi(model, 64)
    cache = model(ids[:, :6], use_cache=True)[1]
    out = model(ids[:, 6:], position_ids=torch.tensor([[6, 7, 8, 0, 1, 2]]), **{name_of_cache(model): cache})
    torch.testing.assert_close(out.logits, model(ids).logits[:, 6:], rtol=0, atol=1e-6)
