"""Arguments of apply_alibi, give_alibi and AlibiHeads are checked before anything is changed."""

import numpy
import pytest
import torch
from torch import nn

from seqwarm_kernels import alibi_slopes, apply_alibi
from seqwarm_kernels.models import AlibiHeads, surgery

from .zoo import make


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("max_seq_length", 1, ValueError),
        ("max_seq_length", 2**31, ValueError),
        ("max_seq_length", 64.0, TypeError),
        ("learn_slopes", 1, TypeError),
    ],
)
def test_bad_arguments_of_apply_alibi(name, value, error, monkeypatch):
    monkeypatch.setattr(surgery.Surgery, "replace", None)  # nothing is replaced
    with pytest.raises(error, match=name):
        apply_alibi(**{"model": make("gpt2"), "max_seq_length": 64, name: value})


def test_a_length_of_numpy_is_taken():
    model = make("gpt2")
    report = apply_alibi(model, numpy.int64(64))
    assert type(report.max_seq_length) is type(model.config.max_position_embeddings) is int


@pytest.mark.parametrize("slopes", [[], [float("nan")], [0.5, -1e39]])
def test_bad_slopes_of_alibi_heads(slopes):
    with pytest.raises(ValueError, match="slopes"):
        AlibiHeads(slopes, causal=True)


@pytest.mark.parametrize("convert", [torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.clone])
def test_alibi_heads_take_sequences_arrays_and_tensors(convert):
    assert AlibiHeads(convert(alibi_slopes(6)), causal=None).slopes.equal(alibi_slopes(6))


@pytest.mark.parametrize(("name", "value"), [("num_heads", 0), ("slopes", [0.5])])
def test_bad_arguments_of_give_alibi(name, value):
    layer = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=name):
        surgery.Surgery(layer, 8, False).give_alibi(layer, **{"num_heads": 2, "causal": True, name: value})
    assert not hasattr(layer, "alibi")
