"""The attention and mask functions that transformers calls."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from seqwarm_kernels import alibi_attention, alibi_slopes
from seqwarm_kernels.models import AlibiHeads, seqwarm
from seqwarm_kernels.models.transformers_attention import attention_forward, pass_packed
from seqwarm_kernels.models.transformers_masks import encode

from .zoo import make, packed, transformers

masking_utils = transformers.masking_utils
HEADS = 2


def layer(causal=True):
    module = nn.Module()
    module.alibi = AlibiHeads(alibi_slopes(HEADS).tolist(), causal=causal)
    return module


def tensors(queries=5, keys=5):
    return [torch.randn(2, HEADS, length, 4, dtype=torch.float64) for length in (queries, keys, keys)]


@pytest.mark.parametrize("causal", [False, True])
def test_a_call_may_override_causal(causal):
    query, key, value = tensors()
    out, weights = attention_forward(layer(not causal), query, key, value, None, is_causal=causal)
    assert weights is None
    torch.testing.assert_close(out.transpose(1, 2), alibi_attention(query, key, value, causal=causal))


def test_unsupported_changes_of_scores_are_refused():
    for name in ("softcap", "s_aux", "sinks", "position_bias", "indices", "block_indices", "write_index"):
        with pytest.raises(ValueError, match=f"^{name}"):
            attention_forward(layer(), *tensors(), None, **{name: torch.ones(2)})


def test_layers_without_slopes():
    unconverted, other = nn.Module(), nn.Module()
    with pytest.raises(ValueError, match="slopes"):
        attention_forward(unconverted, *tensors(), None)
    other.alibi, other.is_causal = None, True
    with pytest.raises(ValueError, match="slopes"):
        attention_forward(other, *tensors(), None)
    other.is_causal = False
    query, key, value = tensors(3, 5)
    out, _ = attention_forward(other, query, key, value, None, scaling=0.3)
    expected = nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)
    torch.testing.assert_close(out.transpose(1, 2), expected)


def test_compiled_masks_are_those_of_eager_code_and_not_too_short():
    """Also after 6 tokens in a cache of 14 slots, whose mask may be longer than the 9 tokens so far."""

    def encoded(mask, seen):
        window = masking_utils.sliding_window_causal_mask_function(5)
        return encode(2, 3, 14, seen, mask_function=window, local_size=5, config=config, attention_mask=mask)

    config = SimpleNamespace(sliding_window=5)
    seen, compiled = torch.tensor(6), torch.compile(encoded, backend="eager", fullgraph=True, dynamic=True)
    for length in (12, 9):
        mask = torch.ones(2, length, dtype=torch.int64)
        assert compiled(mask, seen).equal(encoded(mask, seen))
    with pytest.raises(RuntimeError, match="attention_mask"):
        compiled(mask[:, :8], seen)
    with pytest.raises(ValueError, match="attention_mask"):
        encoded(mask[:, :2], 0)


@pytest.mark.parametrize("name", ["seqwarm_alibi", "seqwarm"])
def test_position_ids_alone_tell_compiled_code_no_packed_sequences(name):
    """Only that of "seqwarm" gets as far as its attention."""
    model = make("llama")

    @torch.compile(backend="eager", fullgraph=True)
    def attend(positions, *qkv):
        if name == "seqwarm_alibi":
            return pass_packed(model, (), {"position_ids": positions})
        sequences = masking_utils.packed_sequence_mask_function(
            positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
        )
        mask_function = masking_utils.and_masks(masking_utils.causal_mask_function, sequences)
        mask = seqwarm.mask_forward(2, 5, 5, mask_function=mask_function, config=model.config)
        return seqwarm.attention_forward(model, *qkv, mask)[0]

    attend(packed((5,), (5,))[0], *tensors())
    with pytest.raises(RuntimeError, match="position_ids"):
        attend(packed((5,), (2, 3))[0], *tensors())


def test_unsupported_patterns_are_refused():
    chunks = masking_utils.chunked_causal_mask_function(4, torch.zeros(2, dtype=torch.int64))
    prefix = masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 2)
    blocks = masking_utils.and_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 2)
    for function in (chunks, prefix, blocks):
        with pytest.raises(ValueError, match="attention_mask"):
            encode(2, 5, 5, mask_function=function)
