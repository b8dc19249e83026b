"""Masks in the way of Hugging Face's models, without a table of queries and keys.

A model asks `AttentionMaskInterface` for a mask once, and hands it to each layer's attention. Anything with four
dimensions is handed on untouched, in generation and with gradient checkpointing too, so `encode` puts what the
kernels need into such a tensor, and `decode` takes it out:

    None                     every key is seen, the last query meets the last key
    (B, 1, 1, K) bool        True where a key is attended
    (B, 1, 1, 1 + K) int32   the position of query 0 first (caches of a fixed size), then the same as 0 and 1
    (1, 1, 1, N + 1) int64   packed sequences: cu_seqlens over the tokens of all rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from .heads import Packing

#: What the kernels do by themselves: causality and windows.
_KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
    "FalconModel",  # of older versions: a pattern that hides nothing, so that there is a mask to add a bias to
}
_PACKED, _REMAPPED, _BOTH = "packed_sequence_mask_function", "remap_positions_for_packed_sequence", "and_masks"


class Visible(NamedTuple):
    """Which keys a batch's queries may see, beyond causality and window."""

    key_padding_mask: Tensor | None = None  #: (B, K) bool
    query_start: Tensor | None = None  #: (B,) int32
    packing: Packing | None = None


def encode(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    config: Any = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Tensor | None:
    """A mask function for `AttentionMaskInterface`; arguments as `transformers.masking_utils.sdpa_mask` has them.

    Raises:
        ValueError: the pattern of the mask is none that the kernels know.
    """
    packed = _packed_sequences(mask_function, use_vmap, local_size, config)
    if packed is not None:
        return _boundaries(packed)
    visible = _visible_keys(attention_mask, kv_length, kv_offset)
    needs_tensor = getattr(config, "model_type", None) == "mpt"  # it calls .to(torch.bool) of whatever it gets
    start = q_offset - kv_offset
    if isinstance(start, int) and start == kv_length - q_length:
        if visible is None and needs_tensor:
            visible = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        return None if visible is None else visible[:, None, None, :]
    if needs_tensor:
        raise ValueError("past_key_values must be a cache that grows for MPT models, got one of a fixed size")
    if visible is None:
        visible = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
    first = torch.zeros(len(visible), 1, dtype=torch.int32, device=device) + start
    return torch.cat([first.to(torch.int32), visible.to(torch.int32)], 1)[:, None, None, :]


def decode(mask: Tensor | None, query: Tensor, key: Tensor) -> Visible:
    """What `encode` put in.

    Args:
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D).

    Raises:
        ValueError: the mask is of another make: a table of queries and keys, or additive.
    """
    if mask is None:
        return Visible()
    shape, key_length = tuple(mask.shape), key.shape[2]
    if mask.dtype == torch.int64 and shape[:3] == (1, 1, 1):
        cu_seqlens = mask.view(-1).to(torch.int32)
        return Visible(packing=Packing(cu_seqlens, cu_seqlens, query.shape[2], key_length))
    if mask.dtype == torch.bool and len(shape) == 4 and shape[1:3] == (1, 1) and shape[3] >= key_length:
        return Visible(mask[:, 0, 0, :key_length].expand(len(query), -1))
    if mask.dtype == torch.int32 and len(shape) == 4 and shape[1:] == (1, 1, key_length + 1):
        return Visible(mask[:, 0, 0, 1:] != 0, mask[:, 0, 0, 0])
    raise ValueError(
        f"attention_mask must be (batch, length) of 0 and 1, got {shape} of {mask.dtype}: a table of queries and keys "
        "is not supported; for packed sequences pass cu_seq_lens_q, cu_seq_lens_k, max_length_q and max_length_k"
    )


def _visible_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """(B, K) bool; None where all are. Asking for that waits for the device, once in a forward, as in other masks."""
    if attention_mask is None:
        return None
    visible = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    if visible.shape[1] < kv_length:  # the free slots of a cache
        visible = functional.pad(visible, (0, kv_length - visible.shape[1]))
    if torch.compiler.is_compiling() or (visible.is_cuda and torch.cuda.is_current_stream_capturing()):
        return visible
    return None if bool(visible.all()) else visible


def _packed_sequences(
    mask_function: Callable[..., Any], use_vmap: bool, local_size: int | None, config: Any
) -> Tensor | None:
    """(B, S): which sequence of its row a token belongs to; None where a row is one sequence.

    Under torch.compile, which cannot look into closures, a pattern is known by its name and arguments, and whether
    sequences are packed is left to `huggingface.check_not_packed`.
    """
    if torch.compiler.is_compiling():
        name = mask_function.__code__.co_name
        is_chunked = local_size is not None and local_size != getattr(config, "sliding_window", None)
        is_custom = use_vmap and getattr(config, "model_type", None) != "falcon"
        if is_custom or is_chunked or name not in (*_KNOWN, "and_mask"):
            _refuse(name)
        return None
    packed = None
    for part in _parts(mask_function):
        name = part.__qualname__.split(".")[0]
        if name == _PACKED:
            packed = _captured(part, "packed_sequence_mask")
        elif name not in _KNOWN:
            _refuse(name)
    return packed


def _parts(mask_function: Callable[..., Any]) -> Iterator[Any]:
    name = mask_function.__qualname__.split(".")[0]
    if name == _BOTH:
        for part in _captured(mask_function, "mask_functions"):
            yield from _parts(part)
    elif name == _REMAPPED:  # packed sequences: their windows and causality count inside a sequence
        yield from _parts(_captured(mask_function, "mask_function"))
    else:
        yield mask_function


def _captured(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _refuse(name: str) -> None:
    raise ValueError(
        f"attention_mask must be causal, bidirectional, a sliding window, padding or packed sequences, got the pattern "
        f"{name}: prefixes, blocks and chunks are not supported with ALiBi"
    )


def _boundaries(packed: Tensor) -> Tensor:
    """(1, 1, 1, N + 1) int64, where sequences start in all rows' tokens, and the end."""
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    ends = functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=packed.numel())
    return ends[None, None, None, :]
