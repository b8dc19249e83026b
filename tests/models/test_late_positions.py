"""Positions that make no difference between the first tokens, such as a temperature that grows later."""

import pytest
import torch
from torch import nn

from seqwarm_kernels import apply_alibi

from .zoo import FAMILIES, HEADS, LAYERS, VOCABULARY, WIDTH, make, tokens, transformers


def test_a_temperature_by_position_is_refused():
    """Queries are multiplied by 1 + beta log(1 + position // 32)."""
    config = transformers.Ministral3Config(**FAMILIES["llama"].options, head_dim=8)
    config.rope_parameters |= {"original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.1}
    torch.manual_seed(0)
    model = transformers.Ministral3ForCausalLM(config).eval()
    for max_seq_length in (16, 256):
        with pytest.raises(ValueError, match="llama_4_scaling_beta"):
            apply_alibi(model, max_seq_length)
    assert not any(hasattr(module, "alibi") for module in model.modules())
    model.config.rope_parameters["llama_4_scaling_beta"] = 0
    assert len(apply_alibi(model, 256).replaced) == LAYERS
    ids, positions = tokens(1, 20), torch.arange(20)[None]
    expected = model(ids, position_ids=positions).logits
    torch.testing.assert_close(model(ids, position_ids=positions + 1000).logits, expected)


class Late(nn.Module):
    """Adds what `rule` makes of the positions."""

    def __init__(self, rule):
        super().__init__()
        self.words, self.rule, self.last = nn.Embedding(VOCABULARY, WIDTH), rule, []
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True), 1)

    def forward(self, input_ids, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand(len(input_ids), -1)
        self.last.append(int(position_ids.max()))
        return self.layers(self.words(input_ids) + self.rule(position_ids)[..., None])


WITHOUT_POSITIONS = {"guessed": None, "tuple": (tokens(2, 9),), "mapping": {"input_ids": tokens(2, 9)}}
WITH_POSITIONS = {
    "with positions": {"input_ids": tokens(2, 9), "position_ids": torch.arange(9).expand(2, -1)},
    "positional": (tokens(2, 9), torch.arange(9).expand(2, -1)),
}


@pytest.mark.parametrize("name", WITH_POSITIONS)
def test_late_positions_are_found(name):
    model = Late(lambda positions: 0.1 * (positions >= 32))
    with pytest.raises(ValueError, match="position_ids"):
        apply_alibi(model, 64, example_batch=WITH_POSITIONS[name])
    assert (len(model.last), model.last[-1]) == (3, 63)
    assert apply_alibi(Late(torch.zeros_like), 64, example_batch=WITH_POSITIONS[name]).verification.calls == 1


@pytest.mark.parametrize("name", WITHOUT_POSITIONS)
def test_the_argument_of_an_own_model_may_mean_something_else(name):
    table = torch.zeros(16)
    model = Late(lambda positions: table[positions])
    assert apply_alibi(model, 64, example_batch=WITHOUT_POSITIONS[name]).verification.calls == 1
    assert len(model.last) == 2


def test_positions_that_are_late_already_are_not_checked_again():
    model = Late(torch.zeros_like)
    apply_alibi(model, 64, example_batch={"input_ids": tokens(1, 9), "position_ids": torch.arange(55, 64)[None]})
    assert model.last == [63, 63]


def test_a_table_that_ends_earlier_is_named():
    table = torch.zeros(32)
    with pytest.raises(ValueError, match="position_ids"):
        apply_alibi(Late(lambda positions: table[positions]), 64, example_batch=WITH_POSITIONS["positional"])


def test_other_inputs_than_tokens_are_not_shifted():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 48, batch_first=True)

        def forward(self, features, position_ids=None):
            assert position_ids is None
            return self.layer(features)

    assert apply_alibi(Features(), 64, example_batch=torch.randn(2, 9, WIDTH)).verification.calls == 1


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "gpt2", "llama"])
def test_models_take_positions_up_to_max_seq_length(name):
    model, seen = make(name), []

    def observe(module, args, kwargs):
        seen.append(kwargs.get("position_ids"))

    model.register_forward_pre_hook(observe, with_kwargs=True)
    apply_alibi(model, 4096)
    *others, last = seen
    assert all(ids is None for ids in others)
    assert last[0, [0, -1]].tolist() == [4080, 4095]
