"""Every converted family computes ALiBi attention, compared with its own code in float64 with a dense bias."""

import copy

import pytest
import torch

from seqwarm_kernels import alibi_slopes, apply_alibi
from seqwarm_kernels.models import alibi_layer
from seqwarm_kernels.models.families.native_alibi import falcon_slopes

from .zoo import (
    CONVERTED,
    FAMILIES,
    HEADS,
    OTHERS,
    VOCABULARY,
    changed_by,
    converted,
    dense_mask,
    make,
    padding,
    small,
    tokens,
    without_positions,
)

ROWS, LENGTH = 3, 20


def logits_and_gradients(model, ids, weights, attention_mask):
    model.zero_grad()
    is_opt = model.config.model_type == "opt"  # computes position_ids from the mask by default
    more = {"position_ids": torch.arange(ids.shape[1]).expand_as(ids)} if is_opt else {}
    logits = model(input_ids=ids, attention_mask=attention_mask, **more).logits
    (logits * weights.to(logits.dtype)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


@pytest.fixture(autouse=True)
def softmax_in_float64(monkeypatch):
    """Some families compute softmax in float32 for any input. The exact computation must not be rounded."""
    softmax = torch.nn.functional.softmax

    def without_rounding(x, dim=None, _stacklevel=3, dtype=None):
        return softmax(x, dim, _stacklevel, None if x.dtype == torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", without_rounding)


def rounding_of(model):
    """Return the tolerance of a comparison. Some modules compute in float32 for any input, in both models."""
    rounds = any(
        "RMSNorm" in type(module).__name__ or "ModernBert" in type(module).__name__ for module in model.modules()
    )
    return 1e-6 if rounds else 1e-9


def weights_of(mask):
    """Return the weights of the logits in the loss. A padded token has weight 0."""
    weights = torch.randn(ROWS, LENGTH, VOCABULARY, dtype=torch.float64)
    return weights if mask is None else weights * mask[:, :, None]


def largest(difference):
    return difference.abs().max().item()


def errors(result, exact, weights):
    """Return the errors of the unpadded logits and of every gradient, each relative to its largest value."""
    (logits, gradients), (exact_logits, exact_gradients) = result, exact
    assert gradients.keys() == exact_gradients.keys()
    valid = weights != 0
    found = {"logits": largest((logits.double() - exact_logits)[valid]) / largest(exact_logits)}
    scale = max(largest(gradient) for gradient in exact_gradients.values())
    for name, gradient in gradients.items():
        found[name] = largest(gradient.double() - exact_gradients[name]) / scale
    return found


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "both") for name in [*CONVERTED, *OTHERS]), ("bert", "none"), ("qwen2", "none")],
)
def test_every_family_equals_a_dense_bias(name, kind):
    mask, ids = padding(kind, ROWS, LENGTH), tokens(ROWS, LENGTH)
    weights = weights_of(mask)
    model = make(name)
    twin = without_positions(model)
    dense = dense_mask(twin, alibi_slopes(HEADS), mask, LENGTH, (FAMILIES | OTHERS)[name].causal)
    exact = logits_and_gradients(twin, ids, weights, dense)

    found = errors(logits_and_gradients(converted(name, torch.float64), ids, weights, mask), exact, weights)
    assert max(found.values()) < rounding_of(model), found


def test_rounding_is_that_of_its_own_code():
    ids, weights, model = tokens(ROWS, LENGTH), weights_of(None), make("gpt2")
    twin = without_positions(model)
    dense = dense_mask(twin, alibi_slopes(HEADS), None, LENGTH, True)
    exact = logits_and_gradients(twin, ids, weights, dense)
    found = errors(logits_and_gradients(converted("gpt2"), ids, weights, None), exact, weights)
    eager = errors(logits_and_gradients(twin.float(), ids, weights, dense.float()), exact, weights)
    budget = 4 * max(eager.values()) + 1e-6
    assert max(found.values()) < budget, (found, eager)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("bloom", {"n_head": 6, "hidden_size": 36}),
        ("bloom", {"pretraining_tp": 2, "slow_but_exact": True}),
        ("mpt", {}),
        ("mpt", {"n_heads": 6, "d_model": 36, "attn_config": {"clip_qkv": 0.3}}),
        ("falcon", {}),
        ("falcon", {"multi_query": True}),
        ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ],
)
def test_models_pretrained_with_alibi_keep_their_numbers(name, changes):
    """Their biases are rounded to float32. So is MPT's softmax, which cannot hide keys in float64."""
    mask, ids = padding("both", ROWS, LENGTH), tokens(ROWS, LENGTH)
    weights = weights_of(mask)
    dtype, tolerance = (torch.float32, 1e-5) if name == "mpt" else (torch.float64, 1e-6)
    model = make(name, dtype, **changes)
    twin = copy.deepcopy(model)
    if name == "falcon":  # its eager code adds the bias twice
        twin.config._attn_implementation = "sdpa"
    own = logits_and_gradients(twin, ids, weights, mask)
    apply_alibi(model, 64)
    found = errors(logits_and_gradients(model, ids, weights, mask), own, weights)
    assert max(found.values()) < tolerance, found


def test_falcon_slopes_are_rounded_as_it_was_trained():
    """Its own code rounds the whole bias, too."""
    slopes = falcon_slopes(12, 8)
    assert slopes[0] == 0.5 * 8**-0.5
    assert slopes[8] == torch.tensor(2**-0.5).bfloat16().item() * 8**-0.5


def test_cross_attention_is_unchanged():
    model = make("bert_decoder", torch.float64, add_cross_attention=True)
    twin = without_positions(model)
    ids, states = tokens(ROWS, LENGTH), torch.randn(ROWS, 7, 32, dtype=torch.float64)
    mask, visible = padding("right", ROWS, LENGTH), torch.ones(ROWS, 7)
    visible[1, 4:] = 0
    dense = dense_mask(twin, alibi_slopes(HEADS), mask, LENGTH, True)
    visible_dense = torch.zeros(ROWS, 1, 1, 7, dtype=torch.float64).masked_fill(visible[:, None, None] == 0, -1e30)
    expected = twin(
        ids, attention_mask=dense, encoder_hidden_states=states, encoder_attention_mask=visible_dense
    ).logits
    report = apply_alibi(model, 64)
    assert len(report.replaced) == 2
    logits = model(ids, attention_mask=mask, encoder_hidden_states=states, encoder_attention_mask=visible).logits
    valid = mask != 0
    torch.testing.assert_close(logits[valid], expected[valid], rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("name", "option"),
    [("gpt2", "attn_pdrop"), ("bloom", "attention_dropout"), ("falcon", "attention_dropout"), ("mpt", None)],
)
def test_dropout_of_attention_is_applied(name, option, monkeypatch):
    """Only in training mode, with the model's probability."""
    model = make(name, **({option: 0.5} if option else {}))
    if name == "mpt":  # its config takes integers only
        for block in model.transformer.blocks:
            block.attn.attn_dropout_p = 0.5
    apply_alibi(model, 64)
    probabilities, attention = [], alibi_layer.alibi_attention

    def record(*tensors, dropout_p, **options):
        probabilities.append(dropout_p)
        return attention(*tensors, dropout_p=dropout_p, **options)

    monkeypatch.setattr(alibi_layer, "alibi_attention", record)
    model(tokens())
    model.train()(tokens())
    assert probabilities == [0.0] * 2 + [0.5] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*CONVERTED, "bloom", "mpt", "falcon"])
def test_on_a_gpu(name, dtype):
    """Compare with the same converted model in float64 on the CPU."""
    ids, mask = tokens(ROWS, LENGTH), padding("left", ROWS, LENGTH)
    expected = converted(name, torch.float64)(input_ids=ids, attention_mask=mask).logits
    model = make(name).to("cuda", dtype)
    apply_alibi(model, 64)
    logits = model(input_ids=ids.cuda(), attention_mask=mask.cuda()).logits.double().cpu()
    budget = {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]  # relative to the largest; TF32 is off by default
    assert largest((logits - expected)[mask != 0]) < budget * largest(expected)


@pytest.mark.parametrize("name", ["opt", "bert", "llama"])
def test_max_seq_length_is_no_limit(name):
    """Also in a model whose limit shrinks: longer sequences give the same numbers. It may be more than before, 64."""
    model, shrunk = (converted(name, max_seq_length=length) for length in (100, 8))
    ids, longer = tokens(2, 40), tokens(1, 100)
    for mask in (None, torch.ones_like(ids)):
        assert shrunk(ids, attention_mask=mask).logits.equal(model(ids, attention_mask=mask).logits)
    assert model(longer).logits.isfinite().all()


def test_a_window_that_only_the_mask_has_is_kept():
    model = small("PhimoeForCausalLM", num_hidden_layers=1, sliding_window=4, num_local_experts=2)
    assert changed_by(model, 2) == [2, 3, 4, 5]
    apply_alibi(model, 64)
    assert changed_by(model, 2) == [2, 3, 4, 5]
