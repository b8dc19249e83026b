"""Slopes of models that are converted on the meta device, and then get memory in some way."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from seqwarm_kernels import alibi_slopes, apply_alibi

from .zoo import HEADS, converted, heads_of, make, slopes_of, small, tokens, transformers

OWN = (0.75, 0.1, 0.0, 2.0)
DEFAULT = alibi_slopes(HEADS).tolist()


def on_meta(**options):
    with torch.device("meta"):
        model = small("LlamaForCausalLM")
    apply_alibi(model, 64, **options)
    return model


@pytest.fixture(autouse=True)
def _empty_like_that_is_filled(monkeypatch):
    """New memory holds what was there before, such as 7."""
    empty = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: empty(*args, **kwargs).fill_(7))


def emptied(model):
    return model.to_empty(device="cpu")


def emptied_and_initialized(model):
    model.to_empty(device="cpu").init_weights()
    return model


def emptied_one_by_one(model):
    """As FSDP1 and torchtitan do."""
    for module in model.modules():
        module.to_empty(device="cpu", recurse=False)
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def emptied_in_bfloat16(model):
    return model.to(torch.bfloat16).to_empty(device="cpu")


@pytest.mark.parametrize("way", [emptied, emptied_and_initialized, emptied_one_by_one, emptied_in_bfloat16])
@pytest.mark.parametrize("learn_slopes", [False, True])
def test_slopes_have_their_values(way, learn_slopes):
    slopes, expected = (OWN, torch.tensor(OWN).tolist()) if learn_slopes else (None, DEFAULT)
    model = way(on_meta(learn_slopes=learn_slopes, slopes=slopes))
    assert slopes_of(model) == [expected] * 2
    assert {heads.slopes.dtype for heads in heads_of(model)} == {torch.float32}


@pytest.mark.parametrize("learn_slopes", [False, True])
def test_memory_that_is_emptied_later_keeps_the_slopes(learn_slopes):
    model = converted("llama", learn_slopes=learn_slopes)
    for heads in heads_of(model):
        heads.slopes.data.fill_(0.25)
    assert slopes_of(emptied(model)) == [[0.25] * HEADS] * 2


@pytest.mark.parametrize(("learn_slopes", "slopes_first"), [(False, False), (True, False), (True, True)])
def test_fully_shard(learn_slopes, slopes_first, mesh):
    model = on_meta(learn_slopes=learn_slopes)
    for module in [*(heads_of(model) if slopes_first else []), *model.model.layers, model]:
        fully_shard(module, mesh=mesh)
    emptied_and_initialized(model)
    assert slopes_of(model) == [DEFAULT] * 2
    ids = tokens()
    model(input_ids=ids, labels=ids).loss.backward()
    assert slopes_of(model) == [DEFAULT] * 2


def test_accelerate_makes_the_model():
    accelerate = pytest.importorskip("accelerate")
    with accelerate.init_empty_weights():
        model = small("LlamaForCausalLM")
        apply_alibi(model, 64, learn_slopes=True)
    assert slopes_of(emptied(model)) == [DEFAULT] * 2


def test_a_state_dict_gives_its_slopes():
    model, saved = on_meta(learn_slopes=True), converted("llama", learn_slopes=True, slopes=OWN)
    model.load_state_dict(saved.state_dict(), assign=True)
    assert slopes_of(model) == slopes_of(saved)
    assert model.eval()(tokens()).logits.isfinite().all()


def test_slopes_without_memory_are_an_error():
    model, saved = on_meta(), make("llama")
    model.load_state_dict(saved.state_dict(), assign=True, strict=False)
    with pytest.raises(ValueError, match="slopes"):
        model(tokens())


def test_a_class_that_converts_itself_cannot_be_loaded(tmp_path):
    """`from_pretrained` would leave the slopes, which the checkpoint lacks, as its memory was."""
    make("gpt2").save_pretrained(tmp_path)

    class Converted(transformers.GPT2LMHeadModel):
        def __init__(self, config):
            super().__init__(config)
            apply_alibi(self, 64)

    with pytest.raises(ValueError, match="apply_alibi"):
        Converted.from_pretrained(tmp_path)
