"""A converted model gives the same results compiled, checkpointed and under autocast."""

import copy

import pytest
import torch

from .zoo import converted, padding, tokens, transformers


def padded_batch(ids, mask):
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def loss_and_gradients(model, batch):
    model.zero_grad()
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    return [loss.detach(), *[p.grad for p in model.parameters() if p.grad is not None]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["modernbert", "bloom", "mpt"])
def test_compiled(name):
    """test_segments.py compiles GPT-2."""
    plain, ids, mask = converted(name, learn_slopes=True), tokens(), padding("right")

    def call(model):
        return model(input_ids=ids, attention_mask=mask).logits.square().mean()

    compiled = torch.compile(copy.deepcopy(plain), backend="aot_eager", fullgraph=name != "mpt")
    for model in (plain, compiled):
        call(model).backward()
    torch.testing.assert_close(call(compiled), call(plain))
    gradients = {n: p.grad for n, p in plain.named_parameters()}
    for n, p in compiled._orig_mod.named_parameters():
        torch.testing.assert_close(p.grad, gradients[n], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["gpt2", "bloom"])
def test_gradient_checkpointing(name):
    plain = converted(name).train()
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable()
    batch = padded_batch(tokens(), padding("left"))
    found, expected = (loss_and_gradients(model, batch) for model in (checkpointed, plain))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["gpt2", "mpt"])
def test_autocast(name):
    model, ids = converted(name), tokens()
    exact = model(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(ids).logits
    assert 0 < (logits - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize(("name", "with_boundaries"), [("opt", False), ("llama", True)])
def test_packed_sequences_train_as_padded_rows(name, with_boundaries):
    """As DataCollatorWithFlattening packs them, by position_ids alone or with cu_seq_lens."""
    model = converted(name, torch.float64).train()
    items = [{"input_ids": row[:length].tolist()} for row, length in zip(tokens(3, 9), (9, 1, 6), strict=True)]
    rows = torch.nn.utils.rnn.pad_sequence([torch.tensor(item["input_ids"]) for item in items], batch_first=True)
    mask = torch.arange(9) < torch.tensor([9, 1, 6])[:, None]
    expected = loss_and_gradients(model, padded_batch(rows, mask.long()))
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=with_boundaries)
    torch.testing.assert_close(loss_and_gradients(model, collate(items)), expected, rtol=1e-6, atol=1e-9)


def test_weights_of_attention_cannot_be_asked_for():
    with pytest.raises(ValueError, match="output_attentions"):
        converted("gpt2")(tokens(2, 6), output_attentions=True)
