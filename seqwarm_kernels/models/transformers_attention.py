"""ALiBi attention behind Hugging Face's own doors, under the name "seqwarm_alibi"."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .alibi_layer import AlibiHeads, Packing, attend
from .transformers_masks import Visible, decode, encode

NAME = "seqwarm_alibi"

#: Arguments of attention functions that change the scores in a way that the kernels do not have.
_UNSUPPORTED = {
    "softcap": "capped scores are not supported with ALiBi",
    "s_aux": "attention sinks are not supported with ALiBi",
    "position_bias": "the model adds a position bias of its own",
    "cache": "paged caches are not supported; generate with a DynamicCache or a StaticCache",
}


_DOOR = "transformers.modeling_utils"


def register() -> None:
    """Make "seqwarm_alibi" known to transformers, so that its `from_pretrained` takes a config that asks for it."""
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, encode)


class RegisterOnImport(MetaPathFinder):
    """Registers as soon as transformers is imported: importing it here would cost everyone seconds."""

    @classmethod
    def install(cls) -> None:
        if _DOOR in sys.modules:
            register()
        elif not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != _DOOR:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


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
    """An attention function for `AttentionInterface`: out (B, Sq, Hq, D), and no weights.

    Args:
        module: given `alibi` by `apply_alibi`; None there for layers that it left alone, such as cross-attention.
        attention_mask: what `masks.encode` made.
        sliding_window: w: keys at a distance of w or more are hidden.
        kwargs: cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k for packed sequences.

    Raises:
        ValueError: the model asks for what the kernels do not have, or it had no surgery.
    """
    _check_supported(kwargs)
    if not hasattr(module, "alibi"):
        raise ValueError(
            f"the model's attention is {NAME!r}, but its {type(module).__name__} has no slopes: call "
            "seqwarm_kernels.apply_alibi(model, max_seq_length) after from_pretrained"
        )
    visible = decode(attention_mask, query, key)
    if not isinstance(module.alibi, AlibiHeads):
        return _without_alibi(module, query, key, value, visible, dropout, scaling), None
    packing = _packing(kwargs) or visible.packing
    window = _window(module, sliding_window, visible, attention_mask)
    if packing is None and attention_mask is None and torch.compiler.is_compiling():
        check_not_packed(kwargs.get("position_ids"), query, key)
    out = attend(
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


def check_call(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook. Models may keep output_attentions from their attention, and return None for the weights."""
    if model.config._attn_implementation != NAME:
        raise ValueError(
            f"the model had its surgery, but its attention was set to {model.config._attn_implementation!r}, which has "
            f"no ALiBi: set_attn_implementation({NAME!r})"
        )
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions must be False: the kernels never form the attention weights")


def refuse_packed(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """A forward pre-hook for models that do not hand packed sequences on."""
    if kwargs.get("cu_seq_lens_q") is not None:
        raise ValueError(
            f"cu_seq_lens_q must be None for {type(model).__name__}: it does not hand packed sequences on to its "
            "attention; pad them"
        )


def check_not_packed(position_ids: Tensor | None, query: Tensor, key: Tensor) -> None:
    """For compiled models, which cannot ask what position_ids hold: on the device, without waiting."""
    if position_ids is None or position_ids.dim() != 2 or query.shape[2] != key.shape[2]:
        return
    one_sequence = (position_ids.diff(dim=-1) == 1).all()
    torch._assert_async(
        one_sequence, "position_ids hold packed sequences: compiled models need cu_seq_lens_q and the like for them"
    )


def _window(module: nn.Module, sliding_window: int | None, visible: Visible, mask: Tensor | None) -> int | None:
    """The largest distance: of the layer, of its mask, or of both; some models tell it to one alone."""
    of_layer = None if sliding_window is None else sliding_window - 1
    if of_layer is None or mask is None:
        return visible.window if of_layer is None else of_layer
    if visible.window != of_layer and visible.packing is None:
        raise ValueError(
            f"the window of {type(module).__name__} must be that of its mask, {visible.window}, got {of_layer} as the "
            "largest distance: make sliding_window and layer_types of the config agree with the layers"
        )
    return of_layer


def _check_supported(kwargs: dict[str, Any]) -> None:
    for name, reason in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{name} must be None: {reason}")


def _packing(kwargs: dict[str, Any]) -> Packing | None:
    if kwargs.get("cu_seq_lens_q") is None:
        return None
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    missing = [name for name in names if kwargs.get(name) is None]
    if missing:
        raise ValueError(f"{', '.join(missing)} must be given with cu_seq_lens_q, got None")
    starts_q, starts_k, longest_q, longest_k = (kwargs[name] for name in names)
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
    """Cross-attention, as it was."""
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
