"""Attention masks for Hugging Face models, without a dense mask of queries and keys.

A model calls the function of `AttentionMaskInterface` once, and passes the mask to the attention of each layer. A 4-D
tensor is passed through unchanged, also in generation and with gradient checkpointing. `encode` puts everything that
the kernels need into such a tensor, and `decode` reads it:

    None                     every key is attended, the last query is at the position of the last key
    (B, 1, n, K) int8        1 where a key is attended; K = 0: every key is
    (B, 1, n, 1 + K) int32   first the position of query 0 (caches of a fixed size), then as int8
    (1, 1, n, N + 1) int64   packed sequences: cu_seqlens over the tokens of all rows
    (1, 1, n, 1) int16       1 if position ids restart: compiled models of "seqwarm"
    (B, 1, 1, K) bool        as int8, for MPT, which converts every mask to bool

n is 1 without a window. With a window, n is the largest distance + 2: the size of a dimension can be read without
waiting for the device, and expanding a tensor along a dimension takes no memory. Integers x are stored as ~x, which is
negative: dense masks of 0 and 1 are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..utils.checks import check_values
from ..utils.devices import is_capturing
from .alibi_layer import Packing

#: Functions of transformers.masking_utils that make up a mask, in versions 5.6 to 5.24. They are found by names and
#: closures: `encode` gets one function, and nothing else tells packed sequences, prefixes and blocks apart. The first
#: set hides only keys that the kernels hide without a mask.
_KNOWN = {
    "causal_mask_function",
    "bidirectional_mask_function",
    "FalconModel",  # in older versions: hides nothing, it only creates a mask to which the bias is added
}
_CAUSAL_WINDOW, _BIDIRECTIONAL_WINDOW = "sliding_window_overlay", "sliding_window_bidirectional_overlay"
_PACKED, _REMAPPED, _AND = "packed_sequence_mask_function", "remap_positions_for_packed_sequence", "and_masks"
#: An argument of bidirectional masks only.
ONLY_BIDIRECTIONAL = "allow_is_bidirectional_skip"
#: Dtypes of masks that are stored as complements.
_STORED_AS_COMPLEMENTS = (torch.int8, torch.int16, torch.int32, torch.int64)


class Visible(NamedTuple):
    """The keys that the queries of a batch may attend, apart from causality."""

    key_padding_mask: Tensor | None = None  #: (B, K) bool
    query_start: Tensor | None = None  #: (B,) int32
    packing: Packing | None = None
    window: int | None = None  #: the largest distance
    restarts: Tensor | None = None  #: () bool: whether position ids restart, if that is not known to the host


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
    **more: Any,
) -> Tensor | None:
    """Mask function for `AttentionMaskInterface`, with the arguments of `transformers.masking_utils.sdpa_mask`."""
    if torch.compiler.is_compiling():
        pattern = _pattern_of_arguments(mask_function, use_vmap, local_size, config, ONLY_BIDIRECTIONAL not in more)
    else:
        pattern = _pattern_of_closures(mask_function)
    if pattern.packed is not None:
        return _with_window(~boundaries(pattern.packed)[None, None, None, :], pattern.window)
    if attention_mask is not None:
        _check_length(attention_mask, q_length, kv_length, q_offset, kv_offset)
    visible = _visible_keys(attention_mask, kv_length, kv_offset)
    start = q_offset - kv_offset
    at_the_end = isinstance(start, int) and start == kv_length - q_length
    is_mpt = getattr(config, "model_type", None) == "mpt"
    if is_mpt and not at_the_end:
        raise ValueError("MPT needs a dynamic cache, and an attention_mask of all tokens so far")
    if is_mpt or not at_the_end:
        everything = torch.ones(batch_size, kv_length, dtype=torch.bool, device=device)
        keys = everything if visible is None else visible
        if is_mpt:
            return keys[:, None, None, :]
        first = torch.zeros(len(keys), 1, dtype=torch.int32, device=device) + start
        mask = ~torch.cat([first.to(torch.int32), keys.to(torch.int32)], 1)[:, None, None, :]
    elif visible is not None:
        mask = ~visible.to(torch.int8)[:, None, None, :]
    elif pattern.window is not None:
        mask = torch.empty(1, 1, 1, 0, dtype=torch.int8, device=device)
    else:
        return None
    return _with_window(mask, pattern.window)


def encode_restarts(
    mask: Tensor | None, mask_function: Callable[..., Any], batch_size: int, length: int, device: torch.device | str
) -> Tensor:
    """The `mask` of queries without padding and without a cache, and whether their position ids restart.

    A sequence ends between neighbors that do not see each other.
    """
    rows, tokens = torch.arange(batch_size, device=device)[:, None], torch.arange(1, length, device=device)
    restarts = ~mask_function(rows, 0, tokens, tokens - 1).all()
    window = None if mask is None or mask.shape[2] == 1 else mask.shape[2] - 2
    return _with_window(~restarts.to(torch.int16).view(1, 1, 1, 1), window)


def decode(mask: Tensor | None, query: Tensor, key: Tensor) -> Visible:
    """Read a mask made by `encode`.

    Args:
        mask: Result of `encode`. Dense and additive masks are refused.
        query: (B, Hq, Sq, D).
        key: (B, Hkv, Sk, D).
    """
    if mask is None:
        return Visible()
    shape, key_length = tuple(mask.shape), key.shape[2]
    if len(shape) != 4 or shape[1] != 1 or mask.dtype not in (torch.bool, *_STORED_AS_COMPLEMENTS):
        raise _dense(mask)
    window = None if shape[2] == 1 else shape[2] - 2
    row = mask[:, 0, 0]
    if mask.dtype == torch.int64:
        cu_seqlens = (~row[0]).to(torch.int32)
        return Visible(packing=Packing(cu_seqlens, cu_seqlens, query.shape[2], key_length), window=window)
    if mask.dtype == torch.bool and window is not None:
        raise _dense(mask)
    if mask.dtype == torch.int16:
        return Visible(window=window, restarts=~row[0, 0] != 0)
    if mask.dtype == torch.int8 and shape[3] == 0:
        return Visible(window=window)
    start = None
    if mask.dtype == torch.int32:
        start, row = ~row[:, 0], row[:, 1:]
    if row.shape[1] != key_length:
        raise ValueError(f"attention_mask must have an entry for each of the {key_length} keys, got {row.shape[1]}")
    visible = row if mask.dtype == torch.bool else row != ~0
    return Visible(visible.expand(len(query), -1), start, window=window)


def check_encoded(mask: object) -> None:
    """Check that a 4-D mask of integers, with which a model is called, was made by `encode`, as in generation."""
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype in _STORED_AS_COMPLEMENTS:
        check_values((mask < 0).all(), str(_dense(mask)))


def _dense(mask: Tensor) -> ValueError:
    return ValueError(f"attention_mask must be (batch, length) of 0 and 1, got {tuple(mask.shape)} of {mask.dtype}")


def _check_length(
    attention_mask: Tensor, q_length: int, kv_length: int, q_offset: int | Tensor, kv_offset: int
) -> None:
    """Check that the mask has an entry for each token so far, or for each key.

    transformers takes the newest tokens for padding where a mask is too short. Only a cache of a fixed size has keys
    for which there are no tokens yet: its mask may be longer. Without a cache `kv_length` is the length of the mask,
    which `decode` compares with the keys.
    """
    length, end, seen = attention_mask.shape[1], kv_offset + kv_length, q_offset + q_length
    if length == end:
        return
    if isinstance(seen, Tensor):  # of a cache of a fixed size
        check_values(seen <= length, f"attention_mask must have an entry for each token so far, got {length} entries")
    elif length < seen or end == seen:
        raise ValueError(f"attention_mask must have an entry for each of the {seen} tokens so far, got {length}")


def _visible_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """Return (B, K) bool, or None if all keys are visible.

    The check waits for the device, once in each forward. transformers' own masks do the same.
    """
    if attention_mask is None:
        return None
    visible = attention_mask[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    if visible.shape[1] < kv_length:  # unused slots of a cache
        visible = functional.pad(visible, (0, kv_length - visible.shape[1]))
    if torch.compiler.is_compiling() or is_capturing(visible.device):
        return visible
    return None if bool(visible.all()) else visible


class _Pattern(NamedTuple):
    window: int | None = None  #: the largest distance
    packed: Tensor | None = None  #: (B, S): index of the token's sequence in its row


def _pattern_of_closures(mask_function: Callable[..., Any]) -> _Pattern:
    window, packed = None, None
    for part in _parts(mask_function):
        name = part.__qualname__.split(".")[0]
        if name == _CAUSAL_WINDOW:
            window = _captured(part, "sliding_window") - 1
        elif name == _BIDIRECTIONAL_WINDOW:
            window = _captured(part, "sliding_window")
        elif name == _PACKED:
            packed = _captured(part, "packed_sequence_mask")
        elif name not in _KNOWN:
            _refuse(name)
    return _Pattern(window, packed)


def _pattern_of_arguments(
    mask_function: Callable[..., Any], use_vmap: bool, local_size: int | None, config: Any, is_causal: bool
) -> _Pattern:
    """The pattern under torch.compile, which cannot read closures. `pass_packed` refuses packed sequences."""
    name = mask_function.__code__.co_name
    is_chunked = local_size is not None and local_size != getattr(config, "sliding_window", None)
    is_custom = use_vmap and getattr(config, "model_type", None) != "falcon"
    if is_custom or is_chunked or name not in (*_KNOWN, "and_mask"):
        _refuse(name)
    return _Pattern(None if local_size is None else local_size - is_causal)


def _with_window(mask: Tensor, window: int | None) -> Tensor:
    return mask if window is None else mask.expand(-1, -1, window + 2, -1)


def _parts(mask_function: Callable[..., Any]) -> Iterator[Any]:
    name = mask_function.__qualname__.split(".")[0]
    if name == _AND:
        for part in _captured(mask_function, "mask_functions"):
            yield from _parts(part)
    elif name == _REMAPPED:  # packed sequences: window and causality apply inside each sequence
        yield from _parts(_captured(mask_function, "mask_function"))
    else:
        yield mask_function


def _captured(function: Any, name: str) -> Any:
    return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents


def _refuse(name: str) -> None:
    raise ValueError(
        f"attention_mask must be causal, bidirectional, a sliding window, padding or packed sequences, got {name}"
    )


def boundaries(packed: Tensor) -> Tensor:
    """The starts of the sequences in the tokens of all rows, and the end: (N + 1,) int64.

    `packed` (B, S) has equal numbers for the tokens of one sequence.
    """
    starts = torch.ones_like(packed, dtype=torch.bool)
    starts[:, 1:] = packed[:, 1:] != packed[:, :-1]
    return functional.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=packed.numel())
