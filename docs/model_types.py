"""docs/guides/model_types.md: apply_alibi tried on a small model of every type of transformers.

`python -m docs.model_types` rewrites the page for the installed version, in about ten minutes.
"""

import copy
import multiprocessing
import re
from pathlib import Path

import torch
import transformers
from transformers.models.auto import modeling_auto

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.models import AlibiHeads
from tests.models.zoo import dense_mask, without_positions

PAGE = Path(__file__).parent / "guides" / "model_types.md"
LENGTH, SECONDS = 12, 90
TEXT_CONFIGS = ("text_config", "decoder", "encoder", "decoder_config")

#: Entries of configs that have them.
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "emb_dim", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("embedding_size", "d_embed", "hidden_dim", "attention_hidden_size", "rnn_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "num_decoder_layers"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "d_inner"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(
        ("head_dim", "d_kv", "d_head", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("layer_types", "mlp_layer_types"), None),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "bos_token_id", "decoder_start_token_id"), 1),
    **dict.fromkeys(("vocab_size",), 64),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("pad_token_id",), 0),
}


def model_classes():
    """The language models of transformers, by their types: those with a causal head, then those with a masked one."""
    names = dict(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES) | dict(
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )
    return {kind: name if isinstance(name, str) else name[0] for kind, name in sorted(names.items())}


def small_entries(config):
    entries = {name: size for name, size in SIZES.items() if name in vars(config)}  # not properties
    parts = {name: vars(config).get(name) for name in TEXT_CONFIGS}
    return entries | {
        name: small_entries(part)
        for name, part in parts.items()
        if isinstance(part, transformers.PreTrainedConfig) and part is not config
    }


def build(class_name):
    """A model with large random weights, which make its attention far from uniform."""
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    config_class = model_class.config_class  # of the text, in a model of text and images
    config = config_class(**small_entries(config_class()))
    config._attn_implementation = "eager"
    model = model_class(config)
    number = sum(parameter.numel() for parameter in model.parameters())
    if number > 20_000_000:
        raise ValueError(f"its small config still makes {number:,} parameters")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    return model.eval()


def difference(model, twin):
    """The largest difference of the logits to those of the model's own code in float64, with a dense bias."""
    heads = [module for module in model.modules() if isinstance(module, AlibiHeads)]
    ids = torch.randint(3, 60, (2, LENGTH))
    mask = dense_mask(model, heads[0].slopes, None, LENGTH, heads[0].causal)
    with torch.no_grad():
        expected = without_positions(twin)(ids, attention_mask=mask).logits
        return ((model(ids).logits - expected).abs().max() / expected.abs().max()).item()


def result(class_name):
    """("converted" or "refused" or "not built", what was found)."""
    try:
        model = build(class_name)
    except Exception as error:
        return "not built", [short(error)]
    twin = copy.deepcopy(model)
    try:
        report = apply_alibi(model, 64)
    except ValueError as error:
        return "refused", [short(error)]
    try:
        parity = "—" if type(model).__name__.startswith("Mpt") else f"{difference(model, twin):.0e}"  # makes it bool
    except Exception:  # its own code does not take a dense bias
        parity = "—"
    return "converted", [f"{report.verification.largest_error:.0e}", parity]


def short(error):
    """The first sentence of an error, without numbers that differ from run to run."""
    text = str(error).strip().split("\n")[0].split(". ")[0] or type(error).__name__
    if text.startswith("model must hold attention"):
        return "its attention is not known"
    text = re.sub(r"(differ|off) by [\d.e+-]+", r"\1", text).replace("|", "/").replace("`", "'")
    return text if len(text) < 160 else text[:157] + "..."


def _send(pipe, class_name):
    pipe.send(result(class_name))


def results():
    """Each type in a process of its own, which ends after a while."""
    torch.set_num_threads(1)
    result("LlamaForCausalLM")  # imports what all have in common
    found, context = {}, multiprocessing.get_context("fork")
    for kind, class_name in model_classes().items():
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_send, args=(sending, class_name), daemon=True)
        process.start()
        sending.close()
        try:
            found[kind] = receiving.recv() if receiving.poll(SECONDS) else ("not built", [f"longer than {SECONDS} s"])
        except EOFError:
            found[kind] = ("not built", ["its process ended"])
        process.kill()
        process.join()
        print(kind, *found[kind], flush=True)
    return found


def page(found):
    converted, refused, not_built = (
        {kind: cells for kind, (which, cells) in found.items() if which == outcome}
        for outcome in ("converted", "refused", "not built")
    )
    compared = {kind: cells for kind, cells in converted.items() if cells[1] != "—"}
    reasons = {}
    for kind, (error,) in refused.items():
        reasons.setdefault(_reason(error), []).append(kind)
    grouped = sorted(reasons.items(), key=lambda row: -len(row[1]))
    table = "\n".join(f"| {reason} | {_names(kinds)} |" for reason, kinds in grouped)
    return f"""# Model types

`apply_alibi` tried on a small random model of every type of transformers {transformers.__version__} that is a
causal or a masked language model. `python -m docs.model_types` makes this page.

## Converted

{len(converted)} types. The attention of each layer agrees with the reference in float64 within
{_largest(converted, 0)}. The logits of these types agree with those of the
model's own code in float64, without positions and with a dense bias, within {_largest(compared, 1)} of the largest:

{_names(compared)}.

The code of these takes no such bias, so their layers alone are compared:

{_names(converted.keys() - compared.keys())}.

## Refused

{len(refused)} types. A refused model is as before.

| reason | model types |
|---|---|
{table}

## Not built

{len(not_built)} types could not be built from a small config by the script:

{_names(not_built)}.
"""


def _largest(found, cell):
    return f"{max(float(cells[cell]) for cells in found.values()):.0e}"


def _reason(error):
    """The error without the names of the class and of the layer."""
    error = re.sub(r"^the verification could not run \w+: ", "its forward fails: ", error)
    return re.sub(r" in [\w.]+(?=[: ])|^[\w.]+\.(?=self_attn )", "", error)


def _names(kinds):
    return ", ".join(f"`{kind}`" for kind in sorted(kinds))


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    PAGE.write_text(page(results()))
