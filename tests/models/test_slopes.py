"""`slopes` of apply_alibi: of any kind, and learned. test_checkpoints.py has those of all families."""

import re

import numpy
import pytest
import torch
from torch import nn

from seqwarm_kernels import apply_alibi

from ..support.same import assert_same
from .test_refused import state_of
from .zoo import HEADS, WIDTH, heads_of, make, slopes_of, tokens

OWN = [0.75, 0.1, 0.0, 2.0]


@pytest.mark.parametrize(
    "slopes",
    [
        numpy.array([OWN, OWN], dtype="float32"),
        torch.tensor(OWN, dtype=torch.float64, requires_grad=True),
        [torch.tensor(OWN), numpy.array(OWN)],
        [numpy.float32(number) for number in OWN],
    ],
    ids=lambda slopes: type(slopes).__name__,
)
def test_arrays_and_tensors(slopes):
    model = make("gpt2")
    apply_alibi(model, 64, slopes=slopes)
    assert slopes_of(model) == [torch.tensor(OWN).tolist()] * 2


BAD_SLOPES = [
    (0.5, TypeError, "float"),
    ("0.5", ValueError, "float"),
    ([OWN, 0.5], TypeError, "float"),
    ([0.5, 0.5, 0.5, float("nan")], ValueError, "slopes"),
    ([0.5, 0.5, 0.5, 1e39], ValueError, "slopes"),
    ([OWN, [0.5, 0.5, 0.5, -0.5]], ValueError, "slopes"),
    ([0.5], ValueError, "h.0.attn"),
    ([OWN, OWN[1:]], ValueError, "h.1.attn"),
    ([OWN], ValueError, "slopes"),
    (torch.ones(3, HEADS), ValueError, "slopes"),
]


@pytest.mark.parametrize(
    ("slopes", "error", "message", "converted"), [*((*case, False) for case in BAD_SLOPES), (*BAD_SLOPES[-1], True)]
)
def test_bad_slopes_change_nothing(slopes, error, message, converted):
    model = make("gpt2")
    if converted:
        apply_alibi(model, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    before = state_of(model, optimizer)
    with pytest.raises(error, match=re.escape(message)):
        apply_alibi(model, 96, slopes=slopes, optimizers=optimizer)
    assert_same(before, state_of(model, optimizer))


def test_learned_slopes_begin_at_the_given_ones():
    """They have a group of the optimizer without weight decay, and a second call keeps it."""
    model = make("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    apply_alibi(model, 64, learn_slopes=True, slopes=OWN, optimizers=optimizer)
    group = optimizer.param_groups[-1]
    parameters = group["params"]
    assert parameters == [p for name, p in model.named_parameters() if name.endswith("alibi.slopes")]
    assert (group["weight_decay"], group["lr"]) == (0.0, 1e-2)
    assert slopes_of(model) == [torch.tensor(OWN).tolist()] * 2
    apply_alibi(model, 64, learn_slopes=True, slopes=OWN[::-1], optimizers=optimizer)
    assert optimizer.param_groups[-1]["params"] is parameters
    assert slopes_of(model) == [torch.tensor(OWN[::-1]).tolist()] * 2
    ids = tokens()
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    assert all((parameter != torch.tensor(OWN[::-1])).any() for parameter in parameters)


def test_slopes_are_not_rounded_to_the_default_dtype():
    model = make("llama")
    try:
        torch.set_default_dtype(torch.bfloat16)
        apply_alibi(model, 64, slopes=OWN)
        given = slopes_of(model)
        for heads in heads_of(model):
            heads.reset_parameters()
    finally:
        torch.set_default_dtype(torch.float32)
    assert given == slopes_of(model) == [torch.tensor(OWN).tolist()] * 2


class Twice(nn.Module):
    """Two layers of one attention module."""

    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(11, WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.second = self.first

    def forward(self, tokens):
        x = self.words(tokens)
        x = self.first(x, x, x)[0]
        return self.second(x, x, x)[0]


def test_layers_that_share_a_module_have_one_row():
    model = Twice()
    with pytest.raises(ValueError, match="slopes"):
        apply_alibi(model, 64, slopes=[OWN, OWN])
    assert apply_alibi(model, 64, slopes=[OWN]).verification.calls == 2
    assert slopes_of(model) == [torch.tensor(OWN).tolist()]
