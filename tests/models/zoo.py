"""One small model of every family, and its reference: the model's own code in float64 with a dense bias."""

import copy
import functools
import itertools
from typing import Any, NamedTuple

import pytest
import torch

from seqwarm_kernels import apply_alibi
from seqwarm_kernels.models import AlibiHeads

transformers = pytest.importorskip("transformers")

VOCABULARY, HEADS, WIDTH, LAYERS = 37, 4, 32, 2
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WINDOW = 6
IMAGE = 5  #: a token that stands for a part of an image


class Family(NamedTuple):
    model: str  #: class of a language model
    options: dict[str, Any]  #: of its config
    causal: bool = True
    takes_packed: bool = True
    pretrained_with_alibi: bool = False


def _sized(**more):
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": 48,
        "max_position_embeddings": 64,
        **SPECIAL,
        **more,
    }


def _without_dropout(*names):
    return dict.fromkeys(names, 0.0)


_WORDS = {"vocab_size": VOCABULARY, **SPECIAL}
_GPT2 = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 64}
_GPT2 |= _WORDS | _without_dropout("embd_pdrop", "attn_pdrop", "resid_pdrop")
_DISTIL = {"dim": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": 48, "max_position_embeddings": 64}
_DISTIL |= {"vocab_size": VOCABULARY, "pad_token_id": 0} | _without_dropout("dropout", "attention_dropout")
_MODERN = {"global_attn_every_n_layers": 2, "local_attention": 2 * WINDOW, "num_hidden_layers": 3, "norm_eps": 1e-5}
_MODERN = _sized(**_MODERN, cls_token_id=1, sep_token_id=2)
_OPT = _sized(ffn_dim=48, word_embed_proj_dim=WIDTH, dropout=0.0)
_BERT = _without_dropout("hidden_dropout_prob", "attention_probs_dropout_prob")
_BLOOM = {"hidden_size": WIDTH, "n_layer": LAYERS, "n_head": HEADS, **_WORDS}
_BLOOM |= _without_dropout("hidden_dropout", "attention_dropout")
_MPT = {"d_model": WIDTH, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 64, **_WORDS}

FAMILIES = {
    "gpt2": Family("GPT2LMHeadModel", _GPT2),
    "opt": Family("OPTForCausalLM", _OPT),
    "gpt_neox": Family("GPTNeoXForCausalLM", _sized(rotary_pct=0.5)),
    "llama": Family("LlamaForCausalLM", _sized(num_key_value_heads=2)),
    "mistral": Family("MistralForCausalLM", _sized(num_key_value_heads=2, sliding_window=WINDOW)),
    "qwen2": Family(
        "Qwen2ForCausalLM",
        _sized(num_key_value_heads=2, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    ),
    "qwen3": Family("Qwen3ForCausalLM", _sized(num_key_value_heads=2, head_dim=16)),
    "bert": Family("BertForMaskedLM", _sized(**_BERT), causal=False),
    "bert_decoder": Family("BertLMHeadModel", _sized(is_decoder=True, **_BERT)),
    "roberta": Family("RobertaForMaskedLM", _sized(**_BERT), causal=False),
    "distilbert": Family("DistilBertForMaskedLM", _DISTIL, causal=False),
    "modernbert": Family("ModernBertForMaskedLM", _MODERN, causal=False),
    "bloom": Family("BloomForCausalLM", _BLOOM, takes_packed=False, pretrained_with_alibi=True),
    "mpt": Family("MptForCausalLM", _MPT, takes_packed=False, pretrained_with_alibi=True),
    "falcon": Family(
        "FalconForCausalLM",
        _sized(alibi=True, new_decoder_architecture=False, multi_query=False, hidden_dropout=0.0),
        takes_packed=False,
        pretrained_with_alibi=True,
    ),
    "falcon_rotary": Family(
        "FalconForCausalLM",
        _sized(alibi=False, new_decoder_architecture=True, num_kv_heads=2, hidden_dropout=0.0),
        takes_packed=False,
    ),
}
#: Not registered: recognized by their structure.
OTHERS = {
    "gemma": Family("GemmaForCausalLM", _sized(num_key_value_heads=1, head_dim=8)),
    "olmo2": Family("Olmo2ForCausalLM", _sized()),
    "phi3": Family("Phi3ForCausalLM", _sized(num_key_value_heads=2)),
    "smollm3": Family("SmolLM3ForCausalLM", _sized(num_key_value_heads=2, pad_token_id=0)),
    "stablelm": Family("StableLmForCausalLM", _sized(num_key_value_heads=2), takes_packed=False),
    "granite": Family("GraniteForCausalLM", _sized(attention_multiplier=0.3)),
}
CONVERTED = [name for name, family in FAMILIES.items() if not family.pretrained_with_alibi]
CACHED = [name for name, family in FAMILIES.items() if family.causal and name != "bert_decoder"]


def make(name, dtype=torch.float32, attention="eager", **changes):
    """Return a model in evaluation mode. Large random weights make its attention far from uniform."""
    key = name, dtype, attention, str(changes)
    if key not in _MADE:
        _MADE[key] = _make(name, dtype, attention, changes)
    torch.default_generator.manual_seed(sum(map(ord, name)))
    return copy.deepcopy(_MADE[key])


#: Building a model takes longer than copying it, and `apply_alibi` ten times as long.
_MADE = {}


def _make(name, dtype, attention, changes):
    family = (FAMILIES | OTHERS)[name]
    torch.default_generator.manual_seed(sum(map(ord, name)))
    model_class = getattr(transformers, family.model)
    config = model_class.config_class(**{**family.options, **changes})
    config._attn_implementation = attention
    model = model_class(config)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.15)
    return model.to(dtype).eval()


def small(name, **changes):
    """A model of another class, with the options of Llama."""
    model_class = getattr(transformers, name)
    torch.manual_seed(0)
    return model_class(model_class.config_class(**{**FAMILIES["llama"].options, **changes})).eval()


def converted(name, dtype=torch.float32, max_seq_length=64, **options):
    return copy.deepcopy(_converted(name, dtype, max_seq_length, tuple(options.items())))


@functools.cache
def _converted(name, dtype, max_seq_length, options):
    model = make(name, dtype)
    apply_alibi(model, max_seq_length, **dict(options))
    return model


def changed_by(model, position, length=20, **inputs):
    """Return where the logits of one row change, by more than rounding, with its token at `position`."""
    ids = tokens(1, length)
    other = ids.clone()
    other[0, position] = 3 + (ids[0, position] - 2) % (VOCABULARY - 3)
    difference = model(ids, **inputs).logits - model(other, **inputs).logits
    rounding = 100 * torch.finfo(difference.dtype).eps
    return (difference.abs().amax(-1)[0] > rounding).nonzero()[:, 0].tolist()


def llava(tower="clip_vision_model"):
    """A model of images, 4 tokens each, and text."""
    vision = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 16}
    patch = 2 if tower == "pixtral" else 4
    text = {**FAMILIES["llama"].options, "model_type": "llama"}
    config = transformers.LlavaConfig(
        vision_config={"model_type": tower, **vision, "image_size": 8, "patch_size": patch},
        vision_feature_select_strategy="default" if tower.startswith("clip") else "full",
        text_config=text,
        image_token_id=IMAGE,
        image_seq_length=4,
    )
    torch.manual_seed(0)
    return transformers.LlavaForConditionalGeneration(config).eval()


def batch_with_images():
    """A batch of `llava`: an image in each row."""
    ids = torch.randint(6, VOCABULARY, (2, 12))
    ids[0, :4], ids[1, 3:7] = IMAGE, IMAGE
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 8, 8)}


def heads_of(model):
    return [module for module in model.modules() if isinstance(module, AlibiHeads)]


def slopes_of(model):
    """The slopes of each layer, as lists of numbers."""
    found = (heads.slopes.detach() for heads in heads_of(model))
    return [(slopes.full_tensor() if hasattr(slopes, "full_tensor") else slopes).tolist() for slopes in found]


def tokens(rows=2, length=20):
    """Return random tokens other than the padding token, which some embeddings treat specially."""
    return torch.randint(3, VOCABULARY, (rows, length))


def padding(kind, rows=2, length=20):
    """Return (B, S), 1 at a token, or None for "none". Row 0 is full; every next row has more padding, or of the
    other side than the row before for "both"."""
    if kind == "none":
        return None
    mask = torch.ones(rows, length, dtype=torch.int64)
    for row in range(1, rows):
        mask[row, -3 * row :] = 0
        if kind == "left" or (kind == "both" and row % 2):
            mask[row] = mask[row].flip(0)
    return mask


def packed(*rows, room=0):
    """Return the position ids of rows of sequences, given by their lengths, and the boundaries of all sequences.

    The last of `room` boundaries, if there are fewer sequences, repeat the end.
    """
    positions = torch.stack([torch.cat([torch.arange(length) for length in lengths]) for lengths in rows])
    ends = [0, *itertools.accumulate(length for lengths in rows for length in lengths)]
    starts = torch.tensor(ends + ends[-1:] * (room - len(ends)), dtype=torch.int32)
    length = positions.shape[1]
    boundaries = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": length, "max_length_k": length}
    return positions, boundaries


def alone(model, ids, *rows, **options):
    """Return the outputs for each of the packed sequences by itself."""
    parts = [row.split(lengths) for row, lengths in zip(ids, rows, strict=True)]
    return torch.cat([torch.cat([model(part[None], **options)[0] for part in row], 1) for row in parts])


def without_positions(model):
    """Return a copy in float64 without positions: tables of zeros, angles of zero."""
    twin = copy.deepcopy(model).double()
    for name, module in twin.named_modules():
        if name.endswith(("wpe", "embed_positions", "position_embeddings")):
            module.weight.data.zero_()
            module.weight.requires_grad_(False)
        for buffer_name, buffer in module.named_buffers(recurse=False):
            if buffer_name.endswith("inv_freq"):
                buffer.zero_()
    return twin


def dense_mask(model, slopes, mask, length, causal):
    """Return the mask (B, H, S, S) to add to the scores, in float64, or a dict of masks by layer type."""
    config = model.config
    distance = torch.arange(length)[:, None] - torch.arange(length)
    hidden = torch.zeros(1, 1, length, length, dtype=torch.bool)
    if causal:
        hidden = hidden | (distance < 0)
    if mask is not None:
        hidden = hidden | (mask == 0)[:, None, None, :]
    bias = -slopes.double()[:, None, None] * distance.abs()

    def table(largest):
        too_far = hidden if largest is None else hidden | (distance.abs() > largest)
        return bias.expand(len(too_far), -1, -1, -1).masked_fill(too_far, torch.finfo(torch.float32).min)

    window = getattr(config, "sliding_window", None)
    if window is None:
        return table(None)
    largest = window if config.model_type == "modernbert" else window - 1
    if config.model_type == "mistral":
        return table(largest)
    return {"full_attention": table(None), "sliding_attention": table(largest)}
