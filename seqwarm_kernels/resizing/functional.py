"""Resizes a batch: cuts every tensor to rows of the given length."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Hashable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..ops.backends import check_backend
from ..ops.call_kind import CallCache, call_kind
from ..ops.resize_batch.schema import Kind
from ..utils.checks import check_bool, check_int
from .checked_call import CheckedCall, DirectCall, Options, cached_call
from .containers import flatten_batch, unflatten_batch
from .entry_names import own_name
from .layout import fill_value
from .options import check_keys, check_name_arguments, check_names
from .packed import PackedCall, packed_call
from .packing import PACKED_NAMES, packed_bounds
from .sharded import ShardedCall, holds_dtensors, sharded_call


class ResizeInfo(NamedTuple):
    """Facts about a resized batch. A token is valid where the attention mask is not 0; without a mask all are valid.

    The new rows of a packed batch are its new sequences, but `position_ids` is (1, tokens).
    """

    valid_lengths: Tensor  #: (rows,) int32, number of valid tokens in each new row
    position_ids: Tensor  #: (rows, seq_len) int64, valid tokens before this one in its new row; 0 if not valid
    num_valid_tokens: Tensor  #: () int64, on the batch's device


_direct_calls: CallCache[DirectCall | None] = CallCache()

_OPTIONS_OF_ANY_BATCH = ("mode", "remainder", "seq_dim", "keep_last_token", "copy", "out")


def resize_batch(
    batch: Any,
    seq_len: int,
    *,
    mode: str = "truncate",
    remainder: str = "drop",
    seq_dim: int = 1,
    pad_values: Mapping[str, float] | None = None,
    keep_last_token: bool = False,
    keys: Collection[str] | None = None,
    mask_keys: Collection[str] | None = None,
    copy: bool = True,
    out: Mapping[str, Tensor] | None = None,
    return_info: bool = False,
    backend: str | None = None,
) -> Any:
    """Cut every tensor of `batch` to rows of `seq_len` tokens. The input is not changed.

    Tensors with two or more dimensions are (B, S) or (B, S, features...) and agree on B and S. A (B, S, S) or
    (B, 1, S, S) tensor whose name marks it as a mask or a bias is cut in both sequence dimensions. A 1-D tensor holds
    one entry for each row, and so does a list or tuple with B entries. All other entries pass through. `seq_len >= S`
    changes nothing.

    A packed batch is one row (1, T) of several sequences, or flat tensors (T,), with boundaries ("cu_seq_lens_q",
    "cu_seqlens", ...), "position_ids" that restart at 0, or "seq_idx" or "document_ids" that change. Each sequence is
    cut as a row of its own without padding would be: an attention mask does not move the cut, and nothing is padded.
    Boundaries, the longest length ("max_length_q", ...) and position ids are those of the new sequences. A list with N
    entries holds one for each sequence. Boundaries, position ids and indices are read, which waits for their device:
    the number of new tokens depends on them. In host memory, the first attention mask of integers of each shape is
    read, too: numbers other than 0 and 1 are refused. Later masks of that shape are not read for this, nor are masks on
    a device. Attention masks of floating point are always read: negative numbers are refused.

    Labels are the entries of two or more dimensions called "labels", "label", "label_ids", "targets" or "target", or
    whose names end in "_labels", "_label_ids" or "_targets" ("decoder_labels"). "pad" fills padded slots of labels with
    −100, and "overlap" the labels of duplicated tokens, so that padding is not trained on, and no token twice. If the
    loss leaves out another value, as nanoGPT's leaves out −1, pass it: `pad_values={"targets": -1}`. Entries that are
    called "y" or "target_ids", and entries of floating point that are called "targets" or "label", may hold labels or
    not: "pad" and "overlap" need their value in `pad_values`. Entries of bool or unsigned integers, which cannot hold
    −100, are labels only if they are called "labels" or their names end in "_labels".

    A batch of DTensors, all replicated or all sharded by rows (`Shard(0)`) over one mesh, is resized by each rank
    without an exchange, and its new tensors are placed alike. To be cut into further rows, it needs a multiple of as
    many rows as ranks. The fields of its `ResizeInfo` are DTensors, `num_valid_tokens` a `Partial()` sum.

    Args:
        batch: A mutable mapping of names to tensors (dict, OrderedDict, transformers' BatchEncoding and ModelOutput,
            a TensorDict, ...) or a dataclass. Containers can be nested: `keys`, `mask_keys`, `pad_values` and `out`
            call batch["encoder"]["input_ids"] "encoder.input_ids".
        seq_len: Number of tokens in a new row, at least 1.
        mode: "truncate" keeps the first `seq_len` tokens of each row. If a (B, S) "attention_mask" is resized with
            them, it keeps `seq_len` tokens from the first valid one on, so rows may be padded on either side: a row in
            which fewer follow keeps its last `seq_len`, a row without a valid token its first. With several masks, as
            of an encoder and a decoder, or one of another name ("prompt_attention_mask"), rows must begin with valid
            tokens, because all tensors are cut at one place. Padding is not looked for in masks of other shapes,
            (B, 1, S, S) or (B, S, 1), or of other names ("mask", "key_padding_mask"): a warning says so once for each
            name. "reshape" cuts each row into rows of `seq_len`, in order. "flatten" reads the whole batch as one
            stream, cuts the stream into rows of `seq_len`, and drops the tail.
        remainder: What "reshape" does with the S % seq_len tokens at the end of a row. "drop" drops them. "pad" pads
            them to a full row. "overlap" makes a last new row of the row's last `seq_len` tokens, in which the labels
            of duplicated tokens are filled.
        seq_dim: 1 for (batch, sequence, ...), 0 for (sequence, batch, ...). The results for 0 are transposed views of
            (rows, seq_len, ...) storage.
        pad_values: Value of a padded slot, and of the labels of duplicated tokens, by name. Default: −100 for labels, 0
            for all others.
        keep_last_token: With "truncate", a row whose last valid token was cut holds that token in its last slot, in
            every tensor. Needs a (B, S) "attention_mask", and rows of one sequence.
        keys: Names of the tensors to resize; all other entries pass through. If no attention mask is among the names,
            the mask beside the named "input_ids" or "inputs_embeds" still tells where rows begin. Default: all tensors.
        mask_keys: Names of the (B, S, S) and (B, 1, S, S) tensors that are masks or biases over pairs of tokens.
            Default: "mask", "bias", and names that end in "_mask" or "_bias". A (B, S, S) tensor of another name has S
            features for each token and keeps them all.
        copy: With False, the results are views of the input wherever a view can express them. "truncate" then reads
            the attention mask, which waits for the device, and raises if a row begins with padding.
        out: `BatchBuffers`, or contiguous tensors to write to, by name, each with the source's dtype and device and
            large enough. The results are views of their first elements, so addresses stay the same. None for a packed
            batch, and for DTensors.
        return_info: Also return a `ResizeInfo`.
        backend: None (best available), "reference", "native" or "triton".

    Returns:
        A batch of the same types, or (batch, ResizeInfo).

    Raises:
        TypeError: `batch` is not a mutable mapping or dataclass, or an argument has the wrong type.
        ValueError: The tensors disagree, an argument does not fit them, a row begins with padding and `copy` is False
            or there are several masks, a mask has negative numbers, several rows hold several sequences, two entries
            tell different sequences, or an entry that may hold labels needs a value in `pad_values`. Nothing was
            written.
    """
    kind = None
    if out is None and return_info is False and not torch.compiler.is_compiling():
        kind = call_kind(batch, mode, remainder, seq_dim, pad_values, keep_last_token, keys, mask_keys, copy, backend)
        direct = _direct_calls.get(kind)
        if direct is not None and (resized := direct(batch, seq_len)) is not None:
            return resized
    seq_len = check_int("seq_len", seq_len, minimum=1)
    # the lookup of a checked call would take 1 for True, and 1.0 or True for 1
    seq_dim = seq_dim if type(seq_dim) is int else check_int("seq_dim", seq_dim)
    check_bool("keep_last_token", keep_last_token)
    check_bool("copy", copy)
    check_bool("return_info", return_info)
    if out is not None:
        if not isinstance(out, Mapping):
            raise TypeError(f"out must be a mapping of names to tensors, got {type(out).__name__}")
        if not copy:
            raise ValueError("out must be None with copy=False: views are not written anywhere")
    entries = flatten_batch(batch)
    options = Options(mode=mode, remainder=remainder, seq_dim=seq_dim, keep_last_token=keep_last_token, backend=backend)
    is_plain = not any(own_name(name) in PACKED_NAMES for name in entries)
    is_distributed = holds_dtensors(entries, keys)
    bounds = None if is_plain or is_distributed else packed_bounds(entries, seq_dim)
    call: CheckedCall | PackedCall | ShardedCall
    if is_distributed:
        call = sharded_call(entries, options, pad_values, keys, mask_keys)
    elif bounds is None:
        call = cached_call(entries, options, pad_values, keys, mask_keys)
    else:
        call = packed_call(entries, bounds, options, pad_values, keys, mask_keys)
    new_entries, sizes, info = call.run(entries, seq_len, copy, out, return_info)
    if kind is not None and is_plain and isinstance(call, CheckedCall):  # the values of others may make them packed
        _direct_calls.remember(kind, call.direct(copy))
    new_batch = unflatten_batch(batch, new_entries, sizes)
    return (new_batch, ResizeInfo(*info)) if return_info else new_batch


def check_resize_options(options: Mapping[str, Any]) -> None:
    """Check everything about the options that does not depend on the batch and its device."""
    inspect.signature(resize_batch).bind(None, None, **options)
    check_backend(options.get("backend"))
    _check_names(options.get("pad_values"), options.get("keys"), options.get("mask_keys"))
    batch = dict.fromkeys(("input_ids", "attention_mask"), torch.zeros(1, 1))
    values = {name: value for name, value in options.items() if name in _OPTIONS_OF_ANY_BATCH}
    if isinstance(values.get("out"), Mapping):
        values["out"] = {name: torch.empty_like(token) for name, token in batch.items()}
    resize_batch(batch, 1, **values)


def _check_names(pad_values: Any, keys: Any, mask_keys: Any) -> None:
    """Check the options that name tensors, as for a batch that has all of the tensors."""
    check_name_arguments(pad_values, keys, mask_keys)
    names = [*(pad_values or ()), *(keys or ()), *(mask_keys or ())]
    batch: dict[Any, Tensor] = {name: torch.zeros(1, 1) for name in names if isinstance(name, Hashable)}
    check_keys(keys, batch)
    check_names("mask_keys", mask_keys, batch)
    for name in pad_values or ():
        fill_value(name, Kind.SEQUENCE, torch.float64, pad_values, fills_labels=False)
