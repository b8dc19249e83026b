"""A converted model gives the same logits with any cache as without a cache, and for packed sequences as for each."""

import inspect

import pytest
import torch

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.models.transformers_attention import pass_packed

from .zoo import CACHED, FAMILIES, WIDTH, alone, converted, make, packed, padding, tokens, transformers

ROWS, LENGTH = 2, 14
#: Families and their caches. MPT's masks cannot hold a position, as a static cache needs. `apply_alibi` itself tries a
#: dynamic cache, in every family: test_every_family_is_verified.
CACHES = [("gpt2", "dynamic"), ("mistral", "static"), ("mpt", "dynamic")]


def exact(name):
    return converted(name, torch.float64)


def cache_for(model, kind):
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 5)


@pytest.mark.parametrize(
    ("name", "kind", "mask_kind"),
    [
        *((name, "dynamic" if name == "mpt" else "static", "left") for name in CACHED),
        ("mistral", "dynamic", "left"),
        ("mistral", "dynamic", "none"),
    ],
)
@torch.no_grad()
def test_token_by_token_equals_all_at_once(name, kind, mask_kind):
    """Several tokens first, then one by one. Keys outside the window have left the cache and are not needed."""
    model, ids, mask = exact(name), tokens(ROWS, LENGTH), padding(mask_kind, ROWS, LENGTH)
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    cache, start, logits = cache_for(model, kind), 0, []
    for end in (9, 10, 11, 12, 14):
        seen = None if mask is None else mask[:, :end]
        out = model(ids[:, start:end], attention_mask=seen, past_key_values=cache, use_cache=True)
        logits.append(out.logits)
        start = end
    valid = slice(None) if mask is None else mask != 0
    torch.testing.assert_close(torch.cat(logits, 1)[valid], expected[valid], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), CACHES)
@torch.no_grad()
def test_generate_equals_the_uncached_forward(name, kind):
    """In logits, since small models often repeat a token whatever they attend to."""
    model, ids, mask = exact(name), tokens(ROWS, LENGTH), padding("left", ROWS, LENGTH)
    model.generation_config.eos_token_id = None
    options = {"use_cache": True, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    kind = None if kind == "dynamic" else kind
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=4, cache_implementation=kind, **options)
    for cached in generated.logits:
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        torch.testing.assert_close(cached.double(), logits, rtol=0, atol=1e-5)
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones(ROWS, 1, dtype=mask.dtype)], 1)
    assert generated.sequences.equal(ids)


@pytest.mark.parametrize(("name", "kind"), CACHES)
@torch.no_grad()
def test_a_mask_that_is_not_of_all_tokens_is_refused(name, kind):
    """transformers takes the tokens that it lacks for padding, so the newest keys would be hidden."""
    model, ids = exact(name), tokens(ROWS, LENGTH)
    for seen in (4, 9):  # shorter and longer than the windows
        for new in (1, 2):
            for length in (new, seen + new - 1, *([seen + new + 1] if kind == "dynamic" else [])):
                cache = cache_for(model, kind)
                model(ids[:, :seen], past_key_values=cache, use_cache=True)
                mask = torch.ones(ROWS, length, dtype=torch.int64)
                with pytest.raises(ValueError, match="attention_mask"):
                    model(ids[:, seen : seen + new], attention_mask=mask, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
@torch.no_grad()
def test_a_mask_of_all_slots_of_a_static_cache(name):
    model, ids = exact(name), tokens(ROWS, LENGTH)
    expected, cache = model(ids, use_cache=False).logits, cache_for(model, "static")
    mask = torch.ones(ROWS, LENGTH + 5, dtype=torch.int64)
    for start, end in ((0, 4), (4, 5), (5, LENGTH)):
        out = model(ids[:, start:end], attention_mask=mask, past_key_values=cache, use_cache=True)
        torch.testing.assert_close(out.logits, expected[:, start:end], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [("gpt2", {"use_cache": False}), *((name, {}) for name in ("gpt2", "mistral", "bert", "bloom", "mpt", "falcon"))],
)
def test_a_mask_of_another_length_without_a_cache_is_refused(name, options):
    model, ids = exact(name), tokens(ROWS, LENGTH)
    for length in (1, LENGTH - 1, LENGTH + 1):
        with pytest.raises(ValueError, match=r"(?i)mask|The size of tensor"):
            model(ids, attention_mask=torch.ones(ROWS, length, dtype=torch.int64), **options)


@pytest.mark.parametrize("name", ["gpt2", "mistral"])
def test_a_model_that_ignores_its_cache_is_refused(name, monkeypatch):
    for kind in (transformers.cache_utils.DynamicLayer, transformers.cache_utils.DynamicSlidingWindowLayer):
        monkeypatch.setattr(kind, "update", lambda self, key, value, *args, **kwargs: (key, value))
    model = make(name, torch.bfloat16)  # the largest tolerance
    with pytest.raises(ValueError, match="cache"):
        apply_alibi(model, 64)
    assert not any(hasattr(module, "alibi") for module in model.modules())


def attention_of(model):
    return next(module for module in model.modules() if hasattr(module, "alibi"))


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@torch.no_grad()
def test_attention_of_mpt_takes_both_names_of_a_cache(name):
    attention, cache = attention_of(exact("mpt")), transformers.DynamicCache()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    attention(x[:, :5], None, **{name: cache})
    out, _ = attention(x[:, 5:], None, **{name: cache})
    torch.testing.assert_close(out, attention(x, None)[0][:, 5:])


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_a_keyword_without_a_meaning_is_refused(name):
    with pytest.raises(TypeError, match="'renamed'"):
        attention_of(converted(name))(torch.zeros(1, 3, WIDTH), renamed=None)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.takes_packed])
@torch.no_grad()
def test_packed_sequences_do_not_see_each_other(name):
    """In one row by their boundaries, and in several rows, one of a single sequence, by their positions alone."""
    model, rows = exact(name), ((5, 1, 8), (14,))
    ids, (positions, _) = tokens(2, LENGTH), packed(*rows)
    expected, (first, boundaries) = alone(model, ids, *rows), packed(rows[0])
    more = {} if name == "distilbert" else {"position_ids": first}
    torch.testing.assert_close(model(ids[:1], **boundaries, **more)[0], expected[:1], rtol=0, atol=1e-6)
    cache = {"use_cache": True} if name in CACHED else {}
    for given, more in ((positions + 2, {}), (positions, cache)):  # RoBERTa counts from 2
        torch.testing.assert_close(model(ids, position_ids=given, **more)[0], expected, rtol=0, atol=1e-6)
    if name in ("gpt2", "bert"):
        both = alone(model, ids, rows[0], rows[0])
        torch.testing.assert_close(model(ids, position_ids=first)[0], both, rtol=0, atol=1e-6)
        inside = model.base_model(ids, position_ids=positions, **cache)[0]
        torch.testing.assert_close(inside, alone(model.base_model, ids, *rows), rtol=0, atol=1e-6)


def test_packed_text_beside_positions_of_images():
    """Models such as Qwen2-VL take (4, B, S): the positions of text first."""
    positions, boundaries = packed((5, 9))
    given = {"input_ids": tokens(1, 14), "position_ids": positions.expand(4, 1, -1)}
    _, kwargs = pass_packed(exact("llama"), (), given)
    assert kwargs["cu_seq_lens_q"].equal(boundaries["cu_seq_lens_q"])


@pytest.mark.parametrize("name", ["bert", "llama"])
@torch.no_grad()
def test_positions_of_one_sequence_or_with_a_mask_are_not_packed(name):
    model, ids, (positions, _) = exact(name), tokens(2, LENGTH), packed((5, 9), (5, 9))
    expected = model(ids).logits
    for more in (
        {"position_ids": torch.arange(30, 44)[None]},
        {"position_ids": positions, "attention_mask": torch.ones_like(ids)},
    ):
        torch.testing.assert_close(model(ids, **more).logits, expected, rtol=0, atol=1e-6)


@torch.no_grad()
def test_positions_after_a_cache_tell_no_packed_sequences():
    model, ids, cache = exact("llama"), tokens(1, 12), transformers.DynamicCache()
    model(ids[:, :6], past_key_values=cache)
    out = model(ids[:, 6:], position_ids=torch.tensor([[6, 7, 8, 0, 1, 2]]), past_key_values=cache)
    torch.testing.assert_close(out.logits, model(ids).logits[:, 6:], rtol=0, atol=1e-6)


@torch.no_grad()
def test_a_decoder_of_opt_takes_positional_arguments():
    decoder = exact("opt").model.decoder
    ids, (positions, _) = tokens(1, LENGTH), packed((5, 9))
    masked = decoder(ids, torch.ones_like(ids), position_ids=positions)[0]
    torch.testing.assert_close(masked, decoder(ids)[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "stablelm"])
def test_packed_sequences_that_a_model_cannot_take_are_refused(name):
    model, (positions, boundaries) = exact(name), packed((5, 9))
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        with pytest.raises(ValueError, match="position_ids"):
            model(tokens(1, LENGTH), position_ids=positions)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(tokens(1, LENGTH), **boundaries)
