"""A converted model gives the same logits with any cache as without a cache."""

import inspect

import pytest
import torch

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.models.transformers_attention import pass_packed

from .zoo import CACHED, FAMILIES, make, padding, tokens, transformers

ROWS, LENGTH = 2, 14
#: Families and their caches. MPT's masks cannot hold a position, as a static cache needs.
CACHES = [(name, kind) for name in CACHED for kind in ("dynamic", "static") if (name, kind) != ("mpt", "static")]


def converted(name):
    model = make(name, torch.float64)
    apply_alibi(model, 64)
    return model


def cache_for(model, kind):
    if kind == "dynamic":
        return transformers.DynamicCache(config=model.config)
    return transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 5)


@pytest.mark.parametrize("mask_kind", ["none", "left"])
@pytest.mark.parametrize(("name", "kind"), CACHES)
@torch.no_grad()
def test_token_by_token_equals_all_at_once(name, kind, mask_kind):
    """Several tokens first, then one by one. Keys outside the window have left the cache and are not needed."""
    model, ids, mask = converted(name), tokens(ROWS, LENGTH), padding(mask_kind, ROWS, LENGTH)
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
def test_a_mask_that_is_not_of_all_tokens_is_refused(name, kind):
    """transformers takes the tokens that it lacks for padding, so the newest keys would be hidden."""
    model, ids = converted(name), tokens(ROWS, LENGTH)
    for seen in (4, 9):  # shorter and longer than the windows
        for new in (1, 2):
            for length in (1, new, seen, seen + new - 1, *([seen + new + 1] if kind == "dynamic" else [])):
                cache = cache_for(model, kind)
                model(ids[:, :seen], past_key_values=cache, use_cache=True)
                mask = torch.ones(ROWS, length, dtype=torch.int64)
                with pytest.raises(ValueError, match="attention_mask"):
                    model(ids[:, seen : seen + new], attention_mask=mask, past_key_values=cache, use_cache=True)


@pytest.mark.parametrize("name", ["gpt2", "opt", "gpt_neox", "llama", "bloom", "falcon"])  # without windows
@torch.no_grad()
def test_a_mask_of_all_slots_of_a_static_cache(name):
    model, ids = converted(name), tokens(ROWS, LENGTH)
    expected, cache = model(ids, use_cache=False).logits, cache_for(model, "static")
    mask = torch.ones(ROWS, LENGTH + 5, dtype=torch.int64)
    for start, end in ((0, 4), (4, 5), (5, LENGTH)):
        out = model(ids[:, start:end], attention_mask=mask, past_key_values=cache, use_cache=True)
        torch.testing.assert_close(out.logits, expected[:, start:end], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("use_cache", [False, None])
def test_a_mask_of_another_length_without_a_cache_is_refused(name, use_cache):
    model, ids = converted(name), tokens(ROWS, LENGTH)
    options = {} if use_cache is None or name not in CACHED else {"use_cache": use_cache}
    for length in (1, 9, LENGTH - 1, LENGTH + 1):
        with pytest.raises(ValueError, match=r"(?i)mask|The size of tensor"):
            model(ids, attention_mask=torch.ones(ROWS, length, dtype=torch.int64), **options)


@pytest.mark.parametrize("mask_kind", ["none", "left"])
@pytest.mark.parametrize(("name", "kind"), CACHES)
@torch.no_grad()
def test_generate_equals_the_uncached_forward(name, kind, mask_kind):
    """In logits, since small models often repeat a token whatever they attend to."""
    model, ids, mask = converted(name), tokens(ROWS, LENGTH), padding(mask_kind, ROWS, LENGTH)
    model.generation_config.eos_token_id = None
    mask = torch.ones_like(ids) if mask is None else mask
    options = {"use_cache": True, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    kind = None if kind == "dynamic" else kind
    generated = model.generate(ids, attention_mask=mask, max_new_tokens=8, cache_implementation=kind, **options)
    for cached in generated.logits:
        logits = model(ids, attention_mask=mask, use_cache=False).logits[:, -1]
        torch.testing.assert_close(cached.double(), logits, rtol=0, atol=1e-5)
        ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
        mask = torch.cat([mask, torch.ones(ROWS, 1, dtype=mask.dtype)], 1)
    assert generated.sequences.equal(ids)


def packed(lengths, rows=1):
    positions = torch.cat([torch.arange(length) for length in lengths]).expand(rows, -1)
    starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return positions, starts


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.takes_packed])
def test_packed_sequences_do_not_see_each_other(name):
    """In one row by their boundaries, and in several rows by their positions alone, also in encoders."""
    model, lengths = converted(name), (5, 1, 8)
    ids, (positions, starts) = tokens(2, sum(lengths)), packed(lengths, rows=2)
    alone = torch.cat([model(part).logits for part in ids.split(lengths, 1)], 1)
    sequences = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 8, "max_length_k": 8}
    more = {} if name == "distilbert" else {"position_ids": positions[:1]}
    torch.testing.assert_close(model(ids[:1], **sequences, **more).logits, alone[:1], rtol=0, atol=1e-6)
    cache = {"use_cache": True} if name in CACHED else {}
    for given, more in ((positions, {}), (positions[:1] + 2, {}), (positions, cache)):  # RoBERTa counts from 2
        together = model(ids, position_ids=given, **more).logits
        torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)
    inside = model.base_model(ids, position_ids=positions, **cache)[0]
    expected = torch.cat([model.base_model(part)[0] for part in ids.split(lengths, 1)], 1)
    torch.testing.assert_close(inside, expected, rtol=0, atol=1e-6)


def test_packed_text_beside_positions_of_images():
    """Models such as Qwen2-VL take (4, B, S): the positions of text first."""
    positions, starts = packed((5, 9))
    given = {"input_ids": tokens(1, 14), "position_ids": positions.expand(4, 1, -1)}
    _, kwargs = pass_packed(converted("llama"), (), given)
    assert kwargs["cu_seq_lens_q"].tolist() == starts.tolist()


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_positions_of_one_sequence_or_with_a_mask_are_not_packed(name):
    model, ids, (positions, _) = converted(name), tokens(2, 14), packed((5, 9), rows=2)
    expected = model(ids).logits
    late = torch.arange(30, 44)[None]
    torch.testing.assert_close(model(ids, position_ids=late).logits, expected, rtol=0, atol=1e-6)
    masked = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).logits
    torch.testing.assert_close(masked, expected, rtol=0, atol=1e-6)


def test_a_decoder_of_opt_takes_positional_arguments():
    decoder = converted("opt").model.decoder
    ids, (positions, _) = tokens(1, 14), packed((5, 9))
    masked = decoder(ids, torch.ones_like(ids), position_ids=positions)[0]
    torch.testing.assert_close(masked, decoder(ids)[0], rtol=0, atol=1e-6)


def test_packed_rows_stay_apart_if_one_is_a_single_sequence():
    model, lengths = converted("gpt2"), (5, 9)
    ids, (positions, _) = tokens(2, 14), packed(lengths)
    alone = torch.cat([model(part).logits for part in ids[1:].split(lengths, 1)], 1)
    expected = torch.cat([model(ids[:1]).logits, alone])
    together = model(ids, position_ids=torch.cat([torch.arange(14)[None], positions]), use_cache=False).logits
    torch.testing.assert_close(together, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon", "stablelm"])
def test_packed_sequences_that_a_model_cannot_take_are_refused(name):
    model = converted(name)
    positions, starts = packed((5, 9))
    if "position_ids" in inspect.signature(type(model).forward).parameters:
        with pytest.raises(ValueError, match="position_ids"):
            model(tokens(1, 14), position_ids=positions)
    with pytest.raises(ValueError, match="cu_seq_lens_q"):
        model(tokens(1, 14), cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=9, max_length_k=9)
