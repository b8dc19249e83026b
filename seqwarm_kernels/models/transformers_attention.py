"""ALiBi attention for Hugging Face models, registered under the name "seqwarm_alibi"."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..utils.checks import check_values
from ..utils.modules import CACHE_NAMES, forward_parameters
from .alibi_layer import AlibiHeads, Packing, alibi_layer_attention, has_shards
from .transformers_masks import Visible, boundaries, check_encoded, decode, encode

NAME = "seqwarm_alibi"

#: Arguments of attention functions that change the scores in a way that the kernels do not support.
_UNSUPPORTED = {
    "softcap": "capped scores are not supported",
    "s_aux": "attention sinks are not supported",
    "sinks": "attention sinks are not supported",
    "position_bias": "the model adds its own position bias",
    "indices": "a selection of keys is not supported",
    "block_indices": "a selection of keys is not supported",
    # Only a paged cache comes with it. Before transformers 5.24 such a cache was called `cache`, now every cache is.
    "write_index": "paged caches are not supported; generate with a DynamicCache or a StaticCache",
}

#: Keyword arguments of packed sequences, as for FlashAttention.
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
COMPILED_PACKING = f"position_ids hold packed sequences: compiled models need {', '.join(_PACKING)}"

#: Models of transformers 5.6 to 5.24 in which a module takes `**kwargs`, with the boundaries of packed sequences, and
#: does not pass them on.
DROPS_KEYWORDS = {"decision_transformer", "falcon_h1", "nemotron", "stablelm"}

#: The hook with which Accelerate prepares attention layers for torch's `context_parallel`. Nothing public tells it, and
#: with it a layer would lose its mask.
_CONTEXT_HOOK = "_self_attn_pre_forward_hook"


def register() -> None:
    """Register "seqwarm_alibi" in transformers, where converted models look their attention and masks up."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, encode)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function for `AttentionInterface`.

    Args:
        module: A layer of a converted model. `alibi` is None in layers without ALiBi, such as cross-attention.
        attention_mask: Result of `transformers_masks.encode`.
        sliding_window: w: keys at a distance of w or more are hidden.
        kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k for packed sequences, and `window`.

    Returns:
        out (B, Sq, Hq, D), and None for the weights.
    """
    check_scores(kwargs)
    if not hasattr(module, "alibi"):
        raise ValueError(
            f"{type(module).__name__} has no slopes: call seqwarm_kernels.apply_alibi after from_pretrained"
        )
    visible = decode(attention_mask, query, key)
    if not isinstance(module.alibi, AlibiHeads):
        return _without_alibi(module, query, key, value, visible, dropout, scaling), None
    packing = packing_of(kwargs, visible)
    refuse_accelerate_shards(module)
    if packing is visible.packing is not None and has_shards(module.alibi):
        raise _local_packing()
    window = window_of(module, sliding_window, visible, attention_mask, kwargs)
    out = alibi_layer_attention(
        module,
        query,
        key,
        value,
        causal=is_causal,
        scale=scaling,
        window=window,
        dropout_p=dropout,
        key_padding_mask=visible.key_padding_mask,
        query_start=visible.query_start,
        packing=packing,
    )
    return out.transpose(1, 2).contiguous(), None


def check_scores(kwargs: dict[str, Any]) -> None:
    """Refuse what a layer passes to its attention function and the kernels do not compute."""
    for name, reason in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None: {reason}")


def check_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of converted models. It refuses another attention, output_attentions and dense masks.

    `output_attentions` is checked here, because a model may return None for the weights without passing it on.
    """
    if not torch.compiler.is_compiling():
        register()  # a model that was unpickled in a new process
    attention = model.config._attn_implementation  # transformers has no public name of it
    if attention != NAME:
        raise ValueError(f"the attention of a converted model must be {NAME!r}, got {attention!r}")
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions must be False: the kernels never compute the attention weights")
    masks = _by_name(model, args, kwargs).get("attention_mask")
    for mask in masks.values() if isinstance(masks, Mapping) else (masks,):
        check_encoded(mask)


def refuse_packed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of models that do not pass packed sequences to their attention."""
    packed = {"cu_seq_lens_q": kwargs.get("cu_seq_lens_q"), "position_ids": _packed_indices(model, args, kwargs)}
    for name, value in packed.items():
        if value is not None:
            raise ValueError(f"{type(model).__name__} does not support packed sequences ({name}); pad the batch")


def pass_packed(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Forward pre-hook. `position_ids` that restart become `cu_seq_lens_q`, also for encoders.

    As in the causal masks of transformers, position_ids mark packed sequences only without an attention_mask and a
    cache. These masks look for a cache after `use_cache=True` made an empty one, and OPT does not pass position_ids.
    """
    packed = _packed_indices(decoder, args, kwargs)
    if packed is None:
        return None
    if any(isinstance(part, AlibiHeads) and has_shards(part) for part in decoder.modules()):
        raise _local_packing()
    cu_seq_lens, length = boundaries(packed), packed.shape[1]
    return args, kwargs | dict(zip(_PACKING, (cu_seq_lens, cu_seq_lens, length, length), strict=True))


def _packed_indices(decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The number of each token's sequence, (B, S), if position_ids restart. A compiled model asserts that not."""
    from transformers.masking_utils import find_packed_sequence_indices

    given = _by_name(decoder, args, kwargs)
    position_ids = given.get("position_ids")
    others = ("attention_mask", "cu_seq_lens_q", *CACHE_NAMES)
    if isinstance(position_ids, Tensor) and position_ids.dim() == 3 and len(position_ids) == 4:
        position_ids = position_ids[0]  # of text. The others are of images and videos, as in Qwen2-VL
    if not isinstance(position_ids, Tensor) or position_ids.dim() > 2:
        return None
    if any(given.get(name) is not None for name in others):
        return None
    if torch.compiler.is_compiling():  # and cannot read the values
        is_one = (position_ids.diff(dim=-1) == 1).all()
        check_values(is_one, COMPILED_PACKING)
        return None
    tokens = given.get("inputs_embeds") if given.get("input_ids") is None else given["input_ids"]
    rows = position_ids.shape[0] if tokens is None else tokens.shape[0]
    return find_packed_sequence_indices(position_ids.expand(rows, -1))


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(forward_parameters(model), args, strict=False)) | kwargs if args else kwargs


def window_of(
    module: nn.Module, sliding_window: int | None, visible: Visible, mask: Tensor | None, kwargs: dict[str, Any]
) -> int | None:
    """Return the largest distance: that of the layer, and `window` of a batch that `mode="window"` has resized."""
    window, of_batch = _layer_window(module, sliding_window, visible, mask), kwargs.get("window")
    return of_batch if window is None else window if of_batch is None else min(window, of_batch)


def _layer_window(module: nn.Module, sliding_window: int | None, visible: Visible, mask: Tensor | None) -> int | None:
    """Some models pass the window only to the layer, or only to the mask."""
    of_layer = None if sliding_window is None else sliding_window - 1
    if of_layer is None or mask is None:
        return visible.window if of_layer is None else of_layer
    if visible.window != of_layer and visible.packing is None:
        raise ValueError(
            f"the window of {type(module).__name__} must be that of its mask, {visible.window}, got {of_layer}"
        )
    return of_layer


def refuse_accelerate_shards(module: nn.Module) -> None:
    if any(getattr(hook, "__name__", None) == _CONTEXT_HOOK for hook in module._forward_pre_hooks.values()):
        raise ValueError(
            f"{type(module).__name__} does not support Accelerate's context parallelism; use "
            "seqwarm_kernels.parallel.ContextParallel"
        )


def _local_packing() -> ValueError:
    return ValueError(f"position_ids must hold one sequence under ContextParallel: pass {', '.join(_PACKING)}")


def packing_of(kwargs: dict[str, Any], visible: Visible) -> Packing | None:
    """The boundaries of packed sequences, if the batch has any. Its own come before those of position ids."""
    if kwargs.get("cu_seq_lens_q") is None:
        return visible.packing
    if visible.key_padding_mask is not None:
        raise ValueError("attention_mask must be None beside cu_seq_lens_q, which tells packed sequences")
    starts_q, starts_k, longest_q, longest_k = (kwargs[name] for name in _PACKING)
    return Packing(starts_q.to(torch.int32), starts_k.to(torch.int32), int(longest_q), int(longest_k))


def _without_alibi(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Visible,
    dropout: float,
    scaling: float | None,
) -> Tensor:
    """Cross-attention is computed as before."""
    if getattr(module, "is_causal", False) or visible.packing is not None or visible.window is not None:
        raise ValueError(f"{type(module).__name__} is self-attention without slopes: apply_alibi does not know it")
    mask = visible.key_padding_mask
    out = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else mask[:, None, None, :],
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2).contiguous()
