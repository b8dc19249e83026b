"""Options of an attachment: they are checked when it is made, and not with the first batch."""

import numpy as np
import pytest
import torch
from torch import nn

from seqwarm_kernels import SequenceLengthScheduler

from ..support.schedules import Identity


def test_options_of_an_attachment_are_checked_before_a_batch():
    scheduler, model = SequenceLengthScheduler(8, 32, duration=10), Identity()
    with pytest.raises(ValueError, match="mode must be one of"):
        scheduler.attach(model, mode="junk")
    for name in ("remainder", "seq_dim"):
        with pytest.raises((TypeError, ValueError), match=f"^{name} must"):
            scheduler.attach(model, **{name: "junk"})
    with pytest.raises(TypeError, match="truncat"):
        scheduler.attach(model, truncat=True)
    scheduler.attach(model, keep_last_token=True).remove()  # nothing was attached before


#: Options of `attach`: a value that some batch can have, and values that none can.
ATTACHED = {
    "mode": ("reshape", ["junk", 5]),
    "remainder": ("drop", ["junk", 5]),
    "seq_dim": (0, ["junk", 2]),
    "backend": ("triton", ["nope", 5]),
    "keys": (["idx", "a.position_ids", "cu_seqlens"], []),
    "pad_values": ({"y": np.float32(-1)}, []),
}


@pytest.mark.parametrize("name", ATTACHED)
def test_an_option_of_an_attachment_that_no_batch_can_have(name):
    scheduler, model, (valid, junk) = SequenceLengthScheduler(8, 32, duration=10), Identity(), ATTACHED[name]
    for value in junk:
        with pytest.raises((TypeError, ValueError), match=f"^{name}"):
            scheduler.attach(model, **{name: value})
    assert not model._forward_pre_hooks
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
    for wrapped in (model, torch.compile(model)):
        with pytest.raises(ValueError, match=rf"seq_dim must be 0 for a {name} without batch_first"):
            scheduler.attach(wrapped)
    scheduler.attach(model, seq_dim=0)
    scheduler.attach(OF_TOKENS_FIRST[name](batch_first=True))
    scheduler.attach(nn.Sequential(OF_TOKENS_FIRST[name]()))  # it may turn its inputs
