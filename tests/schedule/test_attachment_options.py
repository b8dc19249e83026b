"""Options of an attachment: they are checked when it is made, and not with the first batch."""

import numpy as np
import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler

from ..support.schedules import Identity

#: Options of `attach`: values that no batch can have, and one that some batch can.
OPTIONS = {
    "mode": (["junk", 5], "reshape"),
    "remainder": (["junk", 5], "drop"),
    "seq_dim": (["junk", 2], 0),
    "backend": (["nope", 5], "triton"),
    "truncat": ([True], None),
    "return_info": ([True], None),
    "keys": ([], ["idx", "a.position_ids", "cu_seqlens"]),
    "pad_values": ([], {"y": np.float32(-1)}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_checked_before_a_batch(name):
    scheduler, model, (junk, valid) = SequenceLengthScheduler(8, 32, duration=10), Identity(), OPTIONS[name]
    for value in junk:
        with pytest.raises((TypeError, ValueError), match=rf"\b{name}\b"):
            scheduler.attach(model, **{name: value})
    assert not model._forward_pre_hooks
    if valid is not None:
        scheduler.attach(model, **{name: valid})


LAYER = {"d_model": 8, "nhead": 2, "dim_feedforward": 8}
OF_TOKENS_FIRST = {
    "MultiheadAttention": lambda **options: nn.MultiheadAttention(8, 2, **options),
    "TransformerEncoderLayer": lambda **options: nn.TransformerEncoderLayer(**LAYER, **options),
    "TransformerDecoderLayer": lambda **options: nn.TransformerDecoderLayer(**LAYER, **options),
    "TransformerEncoder": lambda **options: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(**LAYER, **options), 1, enable_nested_tensor=False
    ),
    "TransformerDecoder": lambda **options: nn.TransformerDecoder(nn.TransformerDecoderLayer(**LAYER, **options), 1),
    "Transformer": lambda **options: nn.Transformer(**LAYER, num_encoder_layers=1, num_decoder_layers=1, **options),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", OF_TOKENS_FIRST)
def test_a_model_of_tokens_before_rows(name):
    """Rows were cut instead of tokens."""
    scheduler, model = SequenceLengthScheduler(4, 8, duration=10), OF_TOKENS_FIRST[name]()
    for wrapped in (model, torch.compile(model, backend="eager")):
        with pytest.raises(ValueError, match=rf"seq_dim must be 0 for a {name} without batch_first"):
            scheduler.attach(wrapped)
    scheduler.attach(model, seq_dim=0)
    scheduler.attach(OF_TOKENS_FIRST[name](batch_first=True))
    scheduler.attach(nn.Sequential(OF_TOKENS_FIRST[name]()))  # it may turn its inputs
