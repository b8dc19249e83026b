"""A converted model gives the same numbers after saving and loading, and a plain load is refused."""

import copy
import json
import pickle

import pytest
import safetensors.torch
import torch

from seqwarm_kernels import apply_alibi, load_alibi_model

from .zoo import FAMILIES, HEADS, WIDTH, converted, heads_of, llava, make, slopes_of, tokens, transformers

SLOPES = "transformer.h.0.attn.alibi.slopes"


OWN, OTHER = (0.3, 0.7, 0.2, 0.4), (0.5, 0.6, 0.7, 0.8)


def save(name, folder, slopes=OWN, learn_slopes=False, **options):
    """Save a converted model with these slopes; return tokens and their logits."""
    model = converted(name, max_seq_length=96, learn_slopes=learn_slopes, slopes=slopes)
    model.save_pretrained(folder, **options)
    ids = tokens(2, 80)
    return ids, model(ids).logits


def assert_refused(model_class, folder, **options):
    with pytest.raises(Exception, match="with ALiBi"):
        model_class.from_pretrained(folder, **options)


def test_a_plain_load_is_refused(tmp_path):
    """Whatever a caller replaces, and in every class."""
    converted("gpt2").save_pretrained(tmp_path)
    replaced = {"attn_implementation": "eager", "experts_implementation": "eager", "ignore_mismatched_sizes": True}
    for each in (transformers.GPT2LMHeadModel, transformers.AutoModel, transformers.AutoConfig):
        for options in ({}, replaced):
            assert_refused(each, tmp_path, **options)


#: Families whose configs differ: in names, in positions that begin at 2, in a config of the attention.
OF_EACH_CONFIG = ["gpt2", "roberta", "mpt"]


@pytest.mark.parametrize(
    "name",
    [*OF_EACH_CONFIG, *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES if name not in OF_EACH_CONFIG)],
)
def test_a_loaded_model_gives_the_same_numbers(name, tmp_path):
    """With slopes of its own in each layer, also after a second call and a second save."""
    model, ids = make(name), tokens(2, 80)
    rows = torch.rand(model.config.num_hidden_layers, HEADS)
    replaced = apply_alibi(model, 48, slopes=rows).replaced
    assert [model.get_submodule(layer.path).alibi.slopes.tolist() for layer in replaced] == rows.tolist()
    apply_alibi(model, 96)
    assert slopes_of(model) == rows.tolist()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["seqwarm_alibi"]["max_seq_length"] == 96
    of_auto_class = load_alibi_model(transformers.AutoModel, tmp_path)
    for heads in heads_of(of_auto_class):
        heads.reset_parameters()
    assert slopes_of(of_auto_class) == rows.tolist()
    model_class = getattr(transformers, FAMILIES[name].model)
    assert_refused(model_class, tmp_path)
    transformers.PreTrainedConfig.from_json_file(tmp_path / "config.json")  # as the Trainer does before it resumes
    loaded = load_alibi_model(model_class, tmp_path)
    loaded.save_pretrained(tmp_path / "again")
    again = load_alibi_model(model_class, tmp_path / "again")
    assert again.config.seqwarm_alibi == model.config.seqwarm_alibi
    expected = model(ids).logits
    for each in (loaded, again):
        assert each.eval()(ids).logits.equal(expected)


@pytest.mark.parametrize("learn_again", [None, False])
def test_learned_slopes_are_restored(learn_again, tmp_path):
    ids, expected = save("llama", tmp_path, (OWN, OTHER), learn_slopes=True)
    assert_refused(transformers.LlamaForCausalLM, tmp_path)
    model = load_alibi_model(transformers.AutoModelForCausalLM, tmp_path, learn_slopes=learn_again).eval()
    assert model(ids).logits.equal(expected)
    assert sum(name.endswith("alibi.slopes") for name, _ in model.named_parameters()) == (learn_again is not False) * 2
    model.save_pretrained(tmp_path / "again")
    again = load_alibi_model(transformers.AutoModelForCausalLM, tmp_path / "again").eval()
    assert again(ids).logits.equal(expected)
    assert again.config.seqwarm_alibi == {"max_seq_length": 96, "learn_slopes": learn_again is not False}


def test_learned_slopes_find_their_layers_in_a_model_with_a_head(tmp_path):
    save("gpt2", tmp_path / "whole", (OWN, OTHER), learn_slopes=True)
    part = load_alibi_model(transformers.GPT2Model, tmp_path / "whole").eval()
    part.save_pretrained(tmp_path / "part")
    whole = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path / "part")
    assert slopes_of(part) == slopes_of(whole) == torch.tensor([OWN, OTHER]).tolist()


def edit_weights(file, change):
    """Replace the tensors of a file by `change` of them."""
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def in_a_file_of_torch(folder):
    """A file of safetensors lies beside it."""
    save("gpt2", folder, OWN)
    torch.save(safetensors.torch.load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    edit_weights(folder / "model.safetensors", lambda tensors: [tensors[key].zero_() for key in tensors])


def in_the_cache_of_the_hub(folder):
    repository, commit = folder / "models--someone--model", "0" * 40
    save("gpt2", repository / "snapshots" / commit, OWN)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)


def many_files(folder):
    save("gpt2", folder, OWN, max_shard_size="20KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2


def beside_others(folder):
    save("gpt2", folder, OTHER)
    save("gpt2", folder, OWN, variant="ema")
    save("gpt2", folder / "best", OWN)


#: How a checkpoint is saved, and with which options it is loaded.
PLACES = {
    "of a variant": (beside_others, {"variant": "ema"}),
    "of a subfolder": (beside_others, {"subfolder": "best"}),
    "in many files": (many_files, {}),
    "in a file of torch": (in_a_file_of_torch, {"use_safetensors": False}),
    "in the cache of the hub": (in_the_cache_of_the_hub, {"local_files_only": True}),
}


@pytest.mark.parametrize("place", PLACES)
def test_slopes_are_those_of_the_files_that_are_loaded(place, tmp_path):
    save_there, options = PLACES[place]
    save_there(tmp_path)
    source, cache = ("someone/model", {"cache_dir": tmp_path}) if "hub" in place else (tmp_path, {})
    loaded = load_alibi_model(transformers.GPT2LMHeadModel, source, **options, **cache)
    assert slopes_of(loaded) == [torch.tensor(OWN).tolist()] * 2


def test_slopes_that_do_not_fit_are_refused(tmp_path):
    save("gpt2", tmp_path, OWN)
    edit_weights(tmp_path / "model.safetensors", lambda tensors: tensors.pop(SLOPES))
    for slopes in (None, torch.ones(1), torch.ones(2, 2), torch.tensor([1.0, float("nan"), 1.0, 1.0])):
        if slopes is not None:
            edit_weights(tmp_path / "model.safetensors", lambda tensors, new=slopes: tensors.update({SLOPES: new}))
        with pytest.raises(ValueError, match=r"transformer\.h\.0\.attn\.alibi"):
            load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)
    edit_weights(tmp_path / "model.safetensors", lambda tensors: tensors.update({SLOPES: -torch.tensor(OWN)}))
    loaded = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)  # training may bring them below zero
    assert slopes_of(loaded)[0] == (-torch.tensor(OWN)).tolist()


def encoder_decoder(of_models=True):
    """A model of two BERTs. Made of models, it gives them other configs than their layers hold."""
    encoder = transformers.BertConfig(**FAMILIES["bert"].options)
    decoder = transformers.BertConfig(**FAMILIES["bert_decoder"].options, add_cross_attention=True)
    if of_models:
        torch.manual_seed(0)
        parts = transformers.BertModel(encoder), transformers.BertLMHeadModel(decoder)
        model = transformers.EncoderDecoderModel(encoder=parts[0], decoder=parts[1])
    else:
        config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
        model = transformers.EncoderDecoderModel(config)
    model.config.pad_token_id = model.config.decoder_start_token_id = 0
    return model.eval()


def decoder_batch():
    states = torch.randn(2, 9, WIDTH, generator=torch.Generator().manual_seed(0))
    return {"input_ids": tokens(2, 9), "encoder_hidden_states": states}


def pair_batch():
    return {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 5)}


PARTS = {
    "the language model of LLaVA": (llava, "model.language_model", None),
    "the model below the head of LLaVA": (llava, "model", {"input_ids": torch.arange(3, 12)[None]}),
    "a decoder": (encoder_decoder, "decoder", decoder_batch()),
    "an encoder and a decoder made of configs": (lambda: encoder_decoder(False), "", pair_batch()),
    "GPT-2 below its head": (lambda: make("gpt2"), "transformer", None),
}


@pytest.mark.parametrize("case", PARTS)
def test_a_model_of_which_a_part_is_converted(case, tmp_path):
    make_model, path, batch = PARTS[case]
    model = make_model()
    apply_alibi(model.get_submodule(path), 64, example_batch=batch, slopes=[0.9, 0.5, 0.3, 0.1])
    apply_alibi(model.get_submodule(path), 96, example_batch=batch)
    model.save_pretrained(tmp_path)
    assert_refused(type(model), tmp_path)
    loaded = load_alibi_model(type(model), tmp_path, example_batch=batch).eval()
    inputs = {"input_ids": tokens(2, 9)}
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = tokens(2, 5)
    assert loaded(**inputs).logits.equal(model(**inputs).logits)
    part = loaded.get_submodule(path)
    assert part.config.seqwarm_alibi == {"max_seq_length": 96, "learn_slopes": False}
    loaded.save_pretrained(tmp_path / "again")
    assert_refused(type(model), tmp_path / "again")
    part.save_pretrained(tmp_path / "part")
    assert_refused(type(part), tmp_path / "part")


@pytest.mark.parametrize("name", OF_EACH_CONFIG)
def test_another_model_of_the_same_config_is_as_before(name, tmp_path):
    """Also one that is made later, by the class and by an Auto class."""
    model_class, ids = getattr(transformers, FAMILIES[name].model), tokens()
    model = make(name)
    other = model_class(model.config).eval()
    expected = other(ids).logits
    apply_alibi(model, 64)
    assert other(ids).logits.equal(expected)
    assert model_class(other.config).eval()(ids).logits.shape == expected.shape
    other.save_pretrained(tmp_path)
    assert "with ALiBi" not in (tmp_path / "config.json").read_text()
    loaded = model_class.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert loaded(ids).logits.equal(expected)
    apply_alibi(other, 96)
    assert [each.config.seqwarm_alibi["max_seq_length"] for each in (model, other)] == [64, 96]
    assert model(ids).logits.shape == other(ids).logits.shape


def test_copies_and_pickles_of_a_converted_model(tmp_path):
    ids, expected = save("llama", tmp_path)
    model = load_alibi_model(transformers.LlamaForCausalLM, tmp_path).eval()
    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface.register("seqwarm_alibi", None)  # as in a new process, which has not registered it
    for number, twin in enumerate([copy.deepcopy(model), pickle.loads(pickle.dumps(model))]):
        assert twin(ids).logits.equal(expected)
        twin.save_pretrained(tmp_path / str(number))
        assert_refused(transformers.LlamaForCausalLM, tmp_path / str(number))


REMOTE = """
from transformers import LlamaConfig, LlamaForCausalLM

class MyConfig(LlamaConfig):
    model_type = "my_own"

class MyModel(LlamaForCausalLM):
    config_class = MyConfig
"""


def test_a_model_whose_code_is_in_the_checkpoint(tmp_path):
    """Without a download, and only if its code is trusted."""
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain" / "my_model.py").write_text(REMOTE)
    make("llama").save_pretrained(tmp_path / "plain")
    file = tmp_path / "plain" / "config.json"
    code = {"AutoConfig": "my_model.MyConfig", "AutoModelForCausalLM": "my_model.MyModel"}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "my_own", "auto_map": code}))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", trust_remote_code=True)
    apply_alibi(model, 64)
    model.save_pretrained(tmp_path / "converted")
    with pytest.raises(Exception, match="with ALiBi"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "converted", trust_remote_code=True)
    options = {"trust_remote_code": True, "local_files_only": True}
    loaded = load_alibi_model(transformers.AutoModelForCausalLM, tmp_path / "converted", **options)
    assert type(loaded).__name__ == "MyModel"
    ids = tokens()
    assert loaded(ids).logits.equal(model(ids).logits)


def test_options_of_from_pretrained_reach_the_config_and_the_model(tmp_path):
    save("llama", tmp_path)
    loaded = load_alibi_model(transformers.AutoModelForCausalLM, tmp_path, dtype=torch.bfloat16, use_cache=False)
    assert loaded.dtype == torch.bfloat16
    assert loaded.config.use_cache is False
    loaded, info = load_alibi_model(transformers.LlamaForCausalLM, tmp_path, dtype="auto", output_loading_info=True)
    assert loaded.dtype == torch.float32
    assert "missing_keys" in info


def test_a_checkpoint_without_alibi_raises(tmp_path):
    make("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="name_or_path"):
        load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)
