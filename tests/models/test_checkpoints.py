"""A converted model gives the same numbers after saving and loading, or an error says why not."""

import json
import subprocess
import sys

import pytest
import safetensors.torch
import torch

from seqwarm_kernels import apply_alibi, load_alibi_model
from seqwarm_kernels.models import AlibiHeads
from seqwarm_kernels.models.configs import REFUSED

from ..support.tiers import first_fast
from .zoo import CONVERTED, FAMILIES, HEADS, make, tokens, transformers

SLOPES = "transformer.h.0.attn.alibi.slopes"


def save(name, folder, learn_slopes=False):
    """Save a converted model; return tokens and their logits."""
    model = make(name)
    apply_alibi(model, 96, learn_slopes=learn_slopes)
    if learn_slopes:
        for module in model.modules():
            if isinstance(module, AlibiHeads):
                module.slopes.data = torch.rand(HEADS)
    model.save_pretrained(folder)
    ids = tokens(2, 80)
    return ids, model(ids).logits


@pytest.mark.parametrize("name", FAMILIES)
def test_a_reloaded_and_converted_model_gives_the_same_numbers(name, tmp_path):
    ids, expected = save(name, tmp_path)
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["seqwarm_alibi"]["max_seq_length"] == 96
    model_class = getattr(transformers, FAMILIES[name].model)
    model = model_class.from_pretrained(tmp_path, experts_implementation="eager").eval()
    apply_alibi(model, 96)
    assert model(ids).logits.equal(expected)
    assert load_alibi_model(model_class, tmp_path).eval()(ids).logits.equal(expected)


@pytest.mark.parametrize("learn_again", [False, True])
def test_learned_slopes_are_restored(learn_again, tmp_path):
    ids, expected = save("llama", tmp_path, learn_slopes=True)
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    apply_alibi(model, 96, learn_slopes=learn_again)
    assert model(ids).logits.equal(expected)
    assert sum(name.endswith("alibi.slopes") for name, _ in model.named_parameters()) == (2 if learn_again else 0)
    loaded = load_alibi_model(transformers.AutoModelForCausalLM, tmp_path).eval()
    assert loaded(ids).logits.equal(expected)
    assert sum(name.endswith("alibi.slopes") for name, _ in loaded.named_parameters()) == 2
    model.save_pretrained(tmp_path / "again")
    again = load_alibi_model(transformers.AutoModelForCausalLM, tmp_path / "again").eval()
    assert again(ids).logits.equal(expected)


def test_learned_slopes_find_their_layers_in_a_model_without_a_head(tmp_path):
    ids, _ = save("gpt2", tmp_path, learn_slopes=True)
    whole = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path).eval()
    part = load_alibi_model(transformers.GPT2Model, tmp_path).eval()
    assert part(ids).last_hidden_state.equal(whole.transformer(ids).last_hidden_state)


def test_learned_slopes_find_their_layers_in_a_model_with_a_head(tmp_path):
    save("gpt2", tmp_path / "whole", learn_slopes=True)
    part = load_alibi_model(transformers.GPT2Model, tmp_path / "whole").eval()
    part.save_pretrained(tmp_path / "part")
    whole = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path / "part")
    for layer, other in zip(part.h, whole.transformer.h, strict=True):
        assert layer.attn.alibi.slopes.equal(other.attn.alibi.slopes)


def test_learned_slopes_of_a_subfolder_are_restored(tmp_path):
    """The main folder holds another checkpoint, with other slopes."""
    torch.manual_seed(1)
    save("gpt2", tmp_path, learn_slopes=True)
    ids, expected = save("gpt2", tmp_path / "best", learn_slopes=True)
    model = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path, subfolder="best").eval()
    assert model(ids).logits.equal(expected)


def save_gpt2(folder, slopes, **options):
    """Save a converted model with these slopes in every layer, and return them as a model holds them."""
    model = make("gpt2")
    apply_alibi(model, 96, slopes=slopes)
    model.save_pretrained(folder, **options)
    return slopes_of(model)


def slopes_of(model):
    return [module.slopes.tolist() for module in model.modules() if isinstance(module, AlibiHeads)]


def edit_weights(file, change):
    """Replace the tensors of a file by `change` of them."""
    tensors = safetensors.torch.load_file(file)
    change(tensors)
    safetensors.torch.save_file(tensors, file, {"format": "pt"})


def test_slopes_are_those_of_the_variant(tmp_path):
    default = save_gpt2(tmp_path, [0.3, 0.7, 0.2, 0.4])
    ema = save_gpt2(tmp_path, [0.1, 0.2, 0.3, 0.4], variant="ema")
    assert slopes_of(load_alibi_model(transformers.GPT2LMHeadModel, tmp_path, variant="ema")) == ema
    assert slopes_of(load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)) == default


def test_slopes_of_a_file_that_is_not_loaded_are_ignored(tmp_path):
    save_gpt2(tmp_path, [0.5, 0.6, 0.7, 0.8])
    (tmp_path / "model.safetensors").rename(tmp_path / "old.safetensors")
    expected = save_gpt2(tmp_path, [0.3, 0.7, 0.2, 0.4])
    assert slopes_of(load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)) == expected


def test_slopes_of_many_files_are_restored(tmp_path):
    expected = save_gpt2(tmp_path, [0.3, 0.7, 0.2, 0.4], max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert slopes_of(load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)) == expected


def test_slopes_of_a_file_of_torch_are_restored(tmp_path):
    """Also if a file of safetensors lies beside it that the call does not load."""
    expected = save_gpt2(tmp_path, [0.3, 0.7, 0.2, 0.4])
    torch.save(safetensors.torch.load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    edit_weights(tmp_path / "model.safetensors", lambda tensors: [tensors[key].zero_() for key in tensors])
    loaded = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path, use_safetensors=False)
    assert slopes_of(loaded) == expected


def test_slopes_in_the_cache_of_the_hub_are_restored(tmp_path):
    commit = "0" * 40
    repository = tmp_path / "models--someone--model"
    expected = save_gpt2(repository / "snapshots" / commit, [0.3, 0.7, 0.2, 0.4])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    options = {"cache_dir": tmp_path, "local_files_only": True}
    assert slopes_of(load_alibi_model(transformers.GPT2LMHeadModel, "someone/model", **options)) == expected


def test_learned_slopes_below_zero_are_restored(tmp_path):
    """Training may bring them there."""
    save_gpt2(tmp_path, [0.3, 0.7, 0.2, 0.4])
    edit_weights(tmp_path / "model.safetensors", lambda tensors: tensors[SLOPES].neg_())
    loaded = load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)
    assert slopes_of(loaded)[0] == torch.tensor([-0.3, -0.7, -0.2, -0.4]).tolist()


def test_what_is_no_model_is_refused(tmp_path):
    model = make("gpt2")
    apply_alibi(model, 64)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="output_loading_info must be False, got True"):
        load_alibi_model(transformers.GPT2LMHeadModel, tmp_path, output_loading_info=True)
    with pytest.raises(TypeError, match="model_class must load a model, got GPT2Config, which loads GPT2Config"):
        load_alibi_model(transformers.GPT2Config, tmp_path)


@pytest.mark.parametrize(
    ("slopes", "got"),
    [
        (torch.ones(3), r"\[1.0, 1.0, 1.0\]"),
        (torch.ones(1), r"\[1.0\]"),
        (torch.ones(2, 2), r"\[\[1.0, 1.0\], \[1.0, 1.0\]\]"),
        (torch.tensor([1.0, float("nan"), 1.0, 1.0]), r"\[1.0, nan, 1.0, 1.0\]"),
    ],
)
def test_slopes_that_do_not_fit_are_refused(slopes, got, tmp_path):
    save_gpt2(tmp_path, [0.3, 0.7, 0.2, 0.4])
    edit_weights(tmp_path / "model.safetensors", lambda tensors: tensors.update({SLOPES: slopes}))
    message = f"{SLOPES} in '.*model.safetensors' must be 4 finite numbers, one for each head, got {got}"
    with pytest.raises(ValueError, match=message):
        load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)


@pytest.mark.parametrize("size", [0, 100, -1])
def test_a_damaged_file_of_weights_is_named(size, tmp_path):
    save_gpt2(tmp_path, [0.3, 0.7, 0.2, 0.4], max_shard_size="20KB")
    file = sorted(tmp_path.glob("model-*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=f"name_or_path must be .* can be read, got '{file}': .*header"):
        load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpt2", "gpt2"), "model_class must be a Hugging Face model class or an Auto class, got 'gpt2'"),
        ((transformers.GPT2LMHeadModel, 3), "name_or_path must be a path, got int"),
    ],
)
def test_bad_arguments_of_load_alibi_model(arguments, message):
    with pytest.raises(TypeError, match=message):
        load_alibi_model(*arguments)


def test_a_record_of_another_version_is_refused(tmp_path):
    save("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["seqwarm_alibi"]["own_slopes"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"must hold .*own_slopes, got .*another version of seqwarm_kernels wrote the"):
        load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda record: 5, r"seqwarm_alibi in the model's config must hold learn_slopes, .*, got 5: another version"),
        (lambda record: [], r"seqwarm_alibi in the model's config must hold learn_slopes, .*, got \[\]: another"),
        (lambda record: record | {"own_slopes": "no"}, r"seqwarm_alibi.own_slopes in .* be True or False, got 'no'"),
        (lambda record: record | {"learn_slopes": 1}, r"seqwarm_alibi.learn_slopes in .* be True or False, got 1"),
        (lambda record: record | {"max_seq_length": "x"}, r"seqwarm_alibi.max_seq_length in .* be an int, got str"),
        (lambda record: record | {"max_seq_length": 1}, r"seqwarm_alibi.max_seq_length in .* at least 2, got 1"),
        (lambda record: record | {"max_seq_length": 2**62}, r"seqwarm_alibi.max_seq_length in .* below 2\*\*31, got"),
    ],
)
def test_a_damaged_record_is_refused(change, message, tmp_path):
    save("gpt2", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["seqwarm_alibi"] = change(config["seqwarm_alibi"])
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)


def test_an_example_batch_is_checked_before_the_checkpoint_is_loaded():
    with pytest.raises(TypeError, match=r"example_batch must be a mapping, a tensor, .*, got int"):
        load_alibi_model(transformers.GPT2LMHeadModel, "no such folder", example_batch=3)


def test_lost_learned_slopes_raise(tmp_path):
    save("llama", tmp_path, learn_slopes=True)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    config._name_or_path, config._experts_implementation = "", None
    model = transformers.LlamaForCausalLM(config)
    with pytest.raises(ValueError, match=r"the config says that slopes were learned or given, but .* has none for"):
        apply_alibi(model, 96)


@pytest.mark.parametrize("attention", [{}, {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}], ids=str)
@pytest.mark.parametrize("name", first_fast(CONVERTED))
def test_a_plain_reload_is_refused(name, attention, tmp_path):
    """By every class, also if an attention without ALiBi is asked for."""
    save(name, tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for model_class in (getattr(transformers, FAMILIES[name].model), transformers.AutoModel):
        for options in (attention, attention | {"config": config}):
            with pytest.raises(ValueError, match=REFUSED):
                model_class.from_pretrained(tmp_path, **options)


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_a_plain_reload_with_learned_slopes_is_refused(name, tmp_path):
    ids, expected = save(name, tmp_path, learn_slopes=True)
    model_class = getattr(transformers, FAMILIES[name].model)
    with pytest.raises(ValueError, match=REFUSED):
        model_class.from_pretrained(tmp_path)
    assert load_alibi_model(model_class, tmp_path).eval()(ids).logits.equal(expected)


def test_a_composite_model_is_refused_and_loads(tmp_path):
    parts = [transformers.BertConfig(**FAMILIES[name].options) for name in ("bert", "bert_decoder")]
    parts[1].add_cross_attention = True
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.pad_token_id = config.decoder_start_token_id = 0
    model = transformers.EncoderDecoderModel(config).eval()
    batch = {"input_ids": tokens(), "decoder_input_ids": tokens()}
    apply_alibi(model, 96, example_batch=batch)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSED):
        transformers.EncoderDecoderModel.from_pretrained(tmp_path, attn_implementation="sdpa")
    loaded = load_alibi_model(transformers.EncoderDecoderModel, tmp_path, example_batch=batch).eval()
    assert loaded(**batch).logits.equal(model(**batch).logits)


@pytest.mark.parametrize("experts", ["eager", "batched_mm"])
def test_a_model_of_experts_keeps_its_choice(experts, tmp_path):
    options = {**FAMILIES["llama"].options, "num_local_experts": 4}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**options)).eval()
    apply_alibi(model, 96)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSED):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    loaded = load_alibi_model(transformers.MixtralForCausalLM, tmp_path, experts_implementation=experts).eval()
    assert loaded.config._experts_implementation == experts
    ids = tokens()
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits)


def test_a_reload_that_is_not_converted_raises_at_its_first_forward(tmp_path):
    ids, _ = save("gpt2", tmp_path)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path, experts_implementation="eager")
    with pytest.raises(ValueError, match=r"call seqwarm_kernels.apply_alibi\(model, max_seq_length\) after from_pretr"):
        model(ids)


@pytest.mark.slow
def test_without_this_package_a_reload_is_refused(tmp_path):
    save("gpt2", tmp_path)
    code = f"""
import transformers
for options in ({{}}, {{"attn_implementation": "sdpa"}}):
    try:
        transformers.GPT2LMHeadModel.from_pretrained({str(tmp_path)!r}, **options)
    except ValueError as error:
        print(error)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 'attn_implementation="seqwarm_alibi"` is not supported' in result.stdout
    assert REFUSED in result.stdout


@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
def test_models_pretrained_with_alibi_load_without_this_package(name, tmp_path):
    ids, expected = save(name, tmp_path)
    model = getattr(transformers, FAMILIES[name].model).from_pretrained(tmp_path).eval()
    assert model.config._attn_implementation != "seqwarm_alibi"
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("imports", ["seqwarm_kernels, transformers", "transformers, seqwarm_kernels"])
def test_a_fresh_process_loads_and_converts(imports, tmp_path):
    """In either order of imports."""
    ids, expected = save("llama", tmp_path)
    torch.save([ids, expected], tmp_path / "expected.pt")
    code = f"""
import {imports}, torch
model = seqwarm_kernels.load_alibi_model(transformers.AutoModelForCausalLM, {str(tmp_path)!r})
ids, expected = torch.load({str(tmp_path / "expected.pt")!r})
assert model(ids).logits.equal(expected)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_checkpoint_without_alibi_raises(tmp_path):
    make("gpt2").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="name_or_path must be a checkpoint of a model with ALiBi, got"):
        load_alibi_model(transformers.GPT2LMHeadModel, tmp_path)


def test_state_dicts_load_strictly_and_carry_the_slopes():
    first, second = make("bert"), make("bert")
    apply_alibi(first, 64, learn_slopes=True)
    apply_alibi(second, 64, learn_slopes=True)
    first.bert.encoder.layer[0].attention.self.alibi.slopes.data.fill_(0.3)
    second.load_state_dict(first.state_dict())
    ids = tokens()
    assert second(ids).logits.equal(first(ids).logits)
