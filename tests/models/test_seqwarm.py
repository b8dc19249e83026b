"""attn_implementation="seqwarm": models of transformers with their own positions, against their SDPA in float64."""

import pytest
import torch

import seqwarm_kernels.models.seqwarm  # noqa: F401
from seqwarm_kernels import no_compilation

from .zoo import FAMILIES, VOCABULARY, WINDOW, alone, make, packed, padding, tokens, transformers

NAMES = ["gpt2", "opt", "gpt_neox", "llama", "mistral", "qwen2", "qwen3", "gemma", "olmo2", "phi3", "granite"]
#: Segments of two rows, the second with padding at its end or documents of its own: (4 + 9 + 1 + 6), (13 + 7).
LENGTHS = ((4, 9, 1, 6), (13, 7))
ROWS, LENGTH = 2, 20


def pair(name, **changes):
    """The same model under SDPA and under "seqwarm", in float64."""
    return [make(name, torch.float64, attention, **changes) for attention in ("sdpa", "seqwarm")]


def gradients(model, logits):
    (logits * torch.linspace(-1, 1, VOCABULARY, dtype=logits.dtype)).square().sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(ours, actual, model, expected):
    """Logits and gradients agree."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)
    found, exact = gradients(ours, actual), gradients(model, expected)
    assert found.keys() == exact.keys()
    largest = max(gradient.abs().max().item() for gradient in exact.values())
    for name, gradient in exact.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize(
    ("name", "mask_kind"), [*((name, "both") for name in ("gpt2", "opt", "mistral", "qwen2")), ("llama", "none")]
)
def test_logits_and_gradients_are_those_of_sdpa(name, mask_kind):
    (model, ours), ids, mask = pair(name), tokens(3, LENGTH), padding(mask_kind, 3, LENGTH)
    valid = slice(None) if mask is None else mask != 0
    expected, actual = (which(ids, attention_mask=mask).logits[valid] for which in (model, ours))
    assert_same(ours, actual, model, expected)


#: OPT does not pass position_ids to its mask.
TOLD = [*((name, "cu_seq_lens") for name in NAMES), ("gpt2", "position_ids"), ("mistral", "position_ids")]


@pytest.mark.parametrize(("name", "told"), TOLD)
def test_segments_of_several_rows_do_not_see_each_other(name, told):
    (model, ours), ids, (positions, boundaries) = pair(name), tokens(ROWS, LENGTH), packed(*LENGTHS)
    more = boundaries if told == "cu_seq_lens" else {"use_cache": False}
    assert_same(
        ours, ours(ids, position_ids=positions, **more).logits, model, alone(model, ids, *LENGTHS, use_cache=False)
    )


def test_a_compiled_model_takes_new_boundaries_without_another_graph():
    (model, ours), ids = pair("gpt2", n_layer=1), tokens(ROWS, LENGTH)
    compiled = torch.compile(ours, fullgraph=True, backend="eager")

    def check(lengths):
        positions, boundaries = packed(*lengths, room=12)
        actual = compiled(ids, position_ids=positions, use_cache=False, **boundaries).logits
        expected = alone(model, ids, *lengths, use_cache=False)
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)

    check(LENGTHS)
    with no_compilation():
        for lengths in (((20,), (20,)), ((1,) * 6 + (14,), (2, 18))):
            check(lengths)
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"):
        compiled(ids, position_ids=packed(*LENGTHS)[0], use_cache=False)


def test_a_window_of_the_batch_is_beside_that_of_the_layers():
    _, ours = pair("mistral")
    ids = tokens(ROWS, LENGTH)
    narrow, wide = (ours(ids, window=window).logits for window in (2, WINDOW + 3))
    torch.testing.assert_close(wide, ours(ids).logits, rtol=0, atol=0)
    torch.testing.assert_close(narrow, pair("mistral", sliding_window=3)[0](ids).logits, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [None, "static"])
@torch.no_grad()
def test_generated_logits_are_those_of_sdpa(kind):
    ids, mask = tokens(ROWS, 9), padding("left", ROWS, 9)
    options = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    options |= {"cache_implementation": kind, "eos_token_id": None, "disable_compile": True}
    expected, actual = (model.generate(ids, attention_mask=mask, **options) for model in pair("qwen2"))
    assert actual.sequences.equal(expected.sequences)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=0, atol=1e-5)


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
    with pytest.raises(ValueError, match="attention_mask"):
        make("llama", attention="seqwarm")(
            tokens(ROWS, LENGTH), attention_mask=padding("right", ROWS, LENGTH), **packed(*LENGTHS)[1]
        )
