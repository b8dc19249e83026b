"""What replaces the arguments of other libraries' attention, for the error about them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

_CAUSAL = "causal, which is True by default"

_REPLACEMENTS = {
    # torch.nn.functional.scaled_dot_product_attention
    "attn_mask": "slopes for the bias and key_padding_mask, (batch, keys) with True = attend, for padding",
    "is_causal": _CAUSAL,
    "enable_gqa": "no argument: key and value may always have fewer heads",
    # FlashAttention
    "softmax_scale": "scale",
    "window_size": "window, the largest distance, with causal",
    "alibi_slopes": "slopes",
    "return_attn_probs": "return_lse",
    "deterministic": "no argument: gradients are deterministic",
    # FlexAttention
    "score_mod": "slopes",
    "block_mask": "causal, window, segment_length and key_padding_mask",
}


def refuse_other_names(function: str, arguments: Mapping[str, Any]) -> NoReturn:
    """Raise the TypeError of an unexpected argument. It says what to pass instead, if that is known."""
    name = next(iter(arguments))
    instead = f": use {_REPLACEMENTS[name]}" if name in _REPLACEMENTS else ""
    raise TypeError(f"{function}() got an unexpected keyword argument {name!r}{instead}")
