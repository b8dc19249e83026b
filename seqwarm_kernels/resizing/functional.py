"""Resizes a batch: cuts every tensor to rows of the given length."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..utils.checks import check_int
from ..utils.modules import CONTEXT_PART
from .containers import flat_batches, flatten_batch, unflatten_batch
from .layout import check_names
from .options import KEEPING_SHAPE, Options
from .packed import resize_packed
from .packing import packed_bounds
from .plan import plan_for
from .segments import keep_shape


class ResizeInfo(NamedTuple):
    """Facts about a resized batch. A token is valid where the attention mask is not 0; without a mask all are valid.

    The new rows of a packed batch are its new sequences, but `position_ids` is (1, tokens). Of several batches in one,
    `position_ids` is a tuple with a tensor for each.
    """

    valid_lengths: Tensor  #: (rows,) int32, number of valid tokens in each new row
    position_ids: Tensor  #: (rows, seq_len) int64, valid tokens before this one in its new row; 0 if not valid
    num_valid_tokens: Tensor  #: () int64, on the batch's device


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
    boundaries: str | None = None,
    documents: int = 1,
    keep_first_labels: bool = False,
    lengths: tuple[int, int] | None = None,
) -> Any:
    """Cut every tensor of `batch` to rows of `seq_len` tokens, or into segments of them. The input is not changed.

    Tensors are (B, S) or (B, S, features...) and agree on B and S. Masks and biases may be over pairs of tokens, as
    (B, S, S), (B, 1, S, S) or (1, 1, S, S), and are cut on both sides. Position ids may be (S,), (1, S) or (3, B, S). A
    1-D tensor, list or tuple with B entries has one for each row. Other entries pass through. `seq_len >= S` changes
    nothing.

    A packed batch is one row (1, T) of several sequences, or flat tensors (T,). Each sequence is cut as its own row.
    The first of these tells where sequences begin: boundaries ("cu_seq_lens_q", "cu_seqlens", ...), "seq_idx" or
    "document_ids" that change, "position_ids" that restart. They are read, which waits for their device. The new batch
    has the boundaries, the longest length and the position ids of the new sequences.

    Labels are called "labels", "label", "label_ids", "targets" or "target", or have names that end in "_labels",
    "_label_ids" or "_targets". Those of padded slots and of duplicated tokens are filled with −100, so that the loss
    leaves them out. "y", "target_ids" and labels of other dtypes than signed integers need a value in `pad_values`.

    Args:
        batch: A mutable mapping of names to tensors (dict, transformers' BatchEncoding and ModelOutput, a TensorDict,
            ...) or a dataclass. Options call batch["encoder"]["input_ids"] of nested ones "encoder.input_ids".
            Containers with tensors of the same names are batches of their own, unless a tensor of tokens is beside
            them.
        seq_len: Number of tokens in a new row, at least 1.
        mode: "truncate" keeps the first `seq_len` tokens of each row, and with a (B, S) "attention_mask" those from the
            first valid one on, so rows may be padded on either side. With several masks, one of another name, or
            entries that rows share, rows must begin with valid tokens. "reshape" cuts each row into rows of `seq_len`,
            in order. "flatten" cuts the stream of all rows into rows of `seq_len`, and drops its tail. "segments" and
            "window" keep every tensor (B, S), and add entries that limit what a token attends to: its segment of
            `seq_len` tokens, or the `seq_len` tokens up to itself (`window` = `seq_len` − 1, for `alibi_attention`).
        remainder: What "reshape" does with the S % seq_len tokens at the end of a row. "drop" drops them. "pad" pads
            them to a full row. "overlap" makes a last new row of the row's last `seq_len` tokens.
        seq_dim: 1 for (batch, sequence, ...), 0 for (sequence, batch, ...).
        pad_values: Value of a padded slot, and of the labels of duplicated tokens, by name. Default: −100 for labels,
            0 for other tensors.
        keep_last_token: With "truncate", a row whose last valid token was cut holds that token in its last slot, in
            every tensor. Needs a (B, S) "attention_mask", and rows of one sequence.
        keys: Names of the tensors to resize; all other entries pass through. Default: all tensors.
        mask_keys: Names of the masks and biases. Default: "mask", "bias", and names that end in "_mask" or "_bias". A
            (B, S, S) tensor of another name has S features for each token and keeps them all.
        copy: With False, the results are views of the input wherever a view can express them. "truncate" then reads
            the attention mask, which waits for the device, and raises if a row begins with padding.
        out: `BatchBuffers`, or contiguous tensors to write to, by name, each with the source's dtype and device and
            large enough. The results are their first elements, so addresses stay the same. Not for packed batches.
        return_info: Also return a `ResizeInfo`.
        backend: None (best available), "reference", "native" or "triton".
        boundaries: How "segments" tells a model where they begin, besides `position_ids` that count from 0 in each.
            "position_ids" (default): in no other way, as models of transformers read them without FlashAttention.
            "cu_seq_lens": as FlashAttention there, by `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q` and
            `max_length_k`, over the B · S tokens of all rows. "segment_length": by that entry, for `alibi_attention`;
            rows must begin with valid tokens. With the first two, `attention_mask` leaves the batch and
            `use_cache=False` goes in, since models of transformers would ignore the position ids otherwise. Segments
            count from the first valid token of a row, and from the first of each document in a packed batch; padding
            is in segments of its own. Labels of padding are ignored (−100, or as in `pad_values`), as is the first
            label of each segment, unless its name says that labels are shifted already: "shift_labels", "targets", "y".
        documents: With "cu_seq_lens", the most documents of a row, on average over a batch. It has room for
            B · (⌈S / shortest⌉ + documents) boundaries, of which those unused repeat the end. Padding on both sides of
            a row takes the place of one document.
        keep_first_labels: Keep the first label of each segment, which the last token of the segment before predicts.
        lengths: The shortest and the longest length of a training, of which alone sizes depend then.
            `SequenceLengthScheduler.resize` passes it. Default: `seq_len` for both.

    Returns:
        A batch of the same types, or (batch, ResizeInfo).

    Raises:
        TypeError: `batch` is not a mutable mapping or dataclass, or a tensor is sparse or a DTensor.
        ValueError: The tensors disagree, an option does not fit them, rows begin with padding where they must not, an
            attention mask is not one of 0 and 1 (of integers in host memory, the first of each shape is read), an entry
            that may hold labels needs a value in `pad_values`, or the batch is a part that
            `parallel.shard_sequence` returned. Nothing was written.
    """
    if type(seq_len) is not int or seq_len < 1:
        seq_len = check_int("seq_len", seq_len, minimum=1)
    keys = None if keys is None else tuple(keys)
    mask_keys = None if mask_keys is None else tuple(mask_keys)
    options = Options(
        *(mode, remainder, seq_dim, keep_last_token, keys, mask_keys, backend),
        *(boundaries, documents, keep_first_labels, lengths),
    )
    batches = flat_batches(batch, keys)
    if CONTEXT_PART in (batches[0] if len(batches) == 1 else flatten_batch(batch)):
        raise ValueError(f"batch must be whole, got {CONTEXT_PART!r} in it; call shard(scheduler.resize(batch))")
    if out is not None and (not copy or len(batches) > 1):
        raise ValueError("out must be None with copy=False, and for several batches in one")
    for argument, names in (("keys", keys), ("mask_keys", mask_keys), ("pad_values", pad_values)):
        if names is not None:
            check_names(argument, names, flatten_batch(batch))

    new_entries: dict[Any, Any] = {}
    removed: list[Any] = []
    infos = []
    for entries in batches:
        if mode in KEEPING_SHAPE:
            if out is not None:
                raise ValueError(f"out must be None with mode={mode!r}, which copies no tokens")
            resized, left, info = keep_shape(entries, options, pad_values, seq_len)
            removed += left
        elif (bounds := packed_bounds(entries, seq_dim)) is None:
            resized, info = plan_for(entries, options, pad_values).run(entries, seq_len, copy, out, return_info)
        elif out is None:
            resized, info = resize_packed(entries, bounds, options, pad_values, seq_len, copy, return_info)
        else:
            raise ValueError("out must be None for a packed batch, whose number of tokens depends on its sequences")
        new_entries |= resized
        infos.append(info)
    new_batch = unflatten_batch(batch, new_entries, removed)
    return (new_batch, _info_of(infos)) if return_info else new_batch


def _info_of(infos: list[list[Any]]) -> ResizeInfo:
    if len(infos) == 1:
        return ResizeInfo(*infos[0])
    lengths, positions, counts = zip(*infos, strict=True)
    return ResizeInfo(torch.cat(lengths), positions, torch.stack(counts).sum())  # type: ignore[arg-type]


def check_resize_options(options: Mapping[str, Any]) -> None:
    """Check what no batch can make right: the names of options, and the values of the plain ones."""
    arguments = inspect.signature(resize_batch).bind(None, None, **options).arguments
    Options(**{name: value for name, value in arguments.items() if name in Options._fields}).rule()
