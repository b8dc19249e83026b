"""attn_implementation="seqwarm": models of transformers with their own positions, against their SDPA in float64."""

import copy

import pytest
import torch

import seqwarm_kernels.models.seqwarm  # noqa: F401
from seqwarm_kernels import no_compilation

from ..support.tiers import first_fast
from .zoo import FAMILIES, VOCABULARY, WINDOW, make, padding, tokens, transformers

NAMES = ["gpt2", "opt", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi3", "granite"]
#: Segments of two rows, the second with padding at its end or documents of its own: (4 + 9 + 1 + 6), (13 + 7).
LENGTHS = ((4, 9, 1, 6), (13, 7))
ROWS, LENGTH = 2, 20


def pair(name, **changes):
    """The same model under SDPA and under "seqwarm", in float64."""
    model = make(name, torch.float64, **changes)
    config = copy.deepcopy(model.config)
    ours = AutoModel.from_config(config, attn_implementation="seqwarm", dtype=torch.float64).eval()
    ours.load_state_dict(model.state_dict())
    model.set_attn_implementation("sdpa")
    return model, ours


AutoModel = transformers.AutoModelForCausalLM


def packed(lengths=LENGTHS, room=12):
    """What "segments" adds: position_ids that restart, and boundaries whose unused entries repeat the end."""
    rows = [torch.cat([torch.arange(length) for length in row]) for row in lengths]
    ends = torch.tensor([length for row in lengths for length in row]).cumsum(0)
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), ends, ends[-1:].expand(room - len(ends))]).int()
    length = len(rows[0])
    boundaries = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": length, "max_length_k": length}
    return torch.stack(rows), boundaries


def by_hand(model, ids, lengths=LENGTHS):
    """The logits of each segment alone."""
    rows = [
        torch.cat([model(part, use_cache=False).logits for part in row[None].split(lengths[index], 1)], 1)
        for index, row in enumerate(ids)
    ]
    return torch.cat(rows)


def gradients(model, logits, valid=slice(None)):
    (logits[valid] * torch.linspace(-1, 1, VOCABULARY, dtype=logits.dtype)).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("mask_kind", ["none", "left", "right"])
@pytest.mark.parametrize("name", NAMES)
def test_logits_and_gradients_are_those_of_sdpa(name, mask_kind):
    (model, ours), ids, mask = pair(name), tokens(ROWS, LENGTH), padding(mask_kind, ROWS, LENGTH)
    valid = slice(None) if mask is None else mask != 0
    expected, actual = (which(ids, attention_mask=mask).logits for which in (model, ours))
    torch.testing.assert_close(actual[valid], expected[valid], rtol=0, atol=1e-6)
    assert_same(gradients(ours, actual, valid), gradients(model, expected, valid))


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (name, told)
        for name in NAMES
        for told in ("position_ids", "cu_seq_lens")
        if (name, told) != ("opt", "position_ids")
    ],
)  # OPT does not pass position_ids to its mask
def test_segments_of_several_rows_do_not_see_each_other(name, told):
    (model, ours), ids = pair(name), tokens(ROWS, LENGTH)
    positions, boundaries = packed()
    more = boundaries if told == "cu_seq_lens" else {"use_cache": False}
    expected, actual = by_hand(model, ids), ours(ids, position_ids=positions, **more).logits
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert_same(gradients(ours, actual), gradients(model, expected))


@pytest.mark.parametrize("name", first_fast(["mistral", "gpt2", "gpt_neox", "llama", "qwen3"]))
def test_a_compiled_model_takes_new_boundaries_without_another_graph(name):
    (model, ours), ids = pair(name), tokens(ROWS, LENGTH)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    compiled(ids, use_cache=False)  # torch.compile serves rows without segments by a graph of their own

    def check(lengths):
        positions, boundaries = packed(lengths)
        actual = compiled(ids, position_ids=positions, use_cache=False, **boundaries).logits
        torch.testing.assert_close(actual, by_hand(model, ids, lengths), rtol=0, atol=1e-6)

    check(LENGTHS)
    with no_compilation():
        for lengths in (((20,), (20,)), ((10, 10), (10, 10)), ((1,) * 6 + (14,), (2, 18))):
            check(lengths)


def test_position_ids_alone_tell_a_compiled_model_no_segments():
    _, ours = pair("llama")
    compiled, ids = torch.compile(ours, fullgraph=True, backend="aot_eager"), tokens(ROWS, LENGTH)
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        compiled(ids, position_ids=packed()[0], use_cache=False)


def test_a_window_of_the_batch_is_beside_that_of_the_layers():
    _, ours = pair("mistral")
    ids = tokens(ROWS, LENGTH)
    narrow, wide = (ours(ids, window=window).logits for window in (2, WINDOW + 3))
    torch.testing.assert_close(wide, ours(ids).logits, rtol=0, atol=0)
    torch.testing.assert_close(narrow, pair("mistral", sliding_window=3)[0](ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("mask_kind", ["none", "left"])
@pytest.mark.parametrize("name", first_fast(["qwen2", "gpt2", "gpt_neox", "llama", "mistral", "qwen3"]))
@torch.no_grad()
def test_generated_logits_are_those_of_sdpa(name, mask_kind, kind):
    ids, mask = tokens(ROWS, 9), padding(mask_kind, ROWS, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options |= {
        "cache_implementation": None if kind == "dynamic" else kind,
        "eos_token_id": None,
        "disable_compile": True,
    }
    mask = torch.ones_like(ids) if mask is None else mask
    expected, actual = (model.generate(ids, attention_mask=mask, **options) for model in pair(name))
    assert actual.sequences.equal(expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-5)


def test_from_pretrained(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path)
    loaded, ids = AutoModel.from_pretrained(tmp_path, attn_implementation="seqwarm"), tokens(ROWS, LENGTH)
    assert loaded.config._attn_implementation == "seqwarm"
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_config_may_make_a_decoder_bidirectional():
    (model, ours), ids = pair("llama", is_causal=False), tokens(ROWS, LENGTH)
    mask = padding("right", ROWS, LENGTH)
    expected, actual = (which(ids, attention_mask=mask).logits[mask != 0] for which in (model, ours))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    assert not torch.allclose(actual, pair("llama")[1](ids, attention_mask=mask).logits[mask != 0])


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        ("Gemma2", {"head_dim": 8}, "softcap"),
        ("GptOss", {"head_dim": 8, "num_local_experts": 2}, "s_aux"),
        ("Bloom", {"n_head": 4}, "attn_implementation"),
        ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 1}, "attn_implementation"),
    ],
)
def test_other_scores_are_refused(name, options, what):
    config = getattr(transformers, f"{name}Config")(**{**FAMILIES["llama"].options, **options})
    with pytest.raises(ValueError, match=what):
        getattr(transformers, f"{name}ForCausalLM")._from_config(config, attn_implementation="seqwarm")(tokens())


def test_a_mask_beside_boundaries_is_refused():
    _, ours = pair("llama")
    with pytest.raises(ValueError, match="attention_mask"):
        ours(tokens(ROWS, LENGTH), attention_mask=padding("right", ROWS, LENGTH), **packed()[1])
