"""Checks of the inputs of `resize_batch`. Apart from masks they read names, shapes, dtypes and devices, not values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...utils.caller_warnings import warn_caller
from ...utils.checks import check_choice, check_dense, check_int, is_dtensor
from .schema import IGNORED_LABEL, LOSS_MASKS, Kind

MODES = ("truncate", "reshape", "flatten")
REMAINDERS = ("drop", "pad", "overlap")
_USUAL_COLLECTIONS = (list, tuple, set, frozenset)
_LABEL_NAMES = frozenset(("labels", "label", "label_ids", "targets", "target"))
#: Of these, the names that may have a prefix, as in "decoder_labels". "is_target" and "segment_label" are other things.
_LABEL_ENDINGS = ("_labels", "_label_ids", "_targets")
#: The mask of the tokens in the entries beside it. "decoder_attention_mask" is that of "decoder_input_ids".
_MASK, _MASKED_INPUTS = "attention_mask", ("input_ids", "inputs_embeds")
#: Endings of masks that may hide padding. "special_tokens_mask" and "loss_mask" are other things.
_MASKS_OF_PADDING = tuple(
    f"_{kind}_mask" for kind in ("padding", "pad", "attention", "attn", "att", "input", "src", "token", "valid")
)
#: Names of entries with a number of tokens or a position for each row.
_COUNT_NAMES = frozenset(("start_positions", "end_positions", "length", "lengths", "seq_len", "seq_lens"))
_COUNT_ENDINGS = ("_length", "_lengths", "_seq_len", "_seq_lens")
_warn_once = cache(warn_caller)  #: of each text, in a process


@dataclass(frozen=True)
class Layout:
    """The common sizes of the tensors of a batch, and how each is resized."""

    batch_size: int
    source_length: int
    kinds: dict[str, Kind]
    row_lists: list[str]  #: lists and tuples with an entry for each row


def resizing_rule(mode: str, remainder: str, keep_last_token: bool) -> str:
    """The operator's rule for the caller's mode, remainder and keep_last_token."""
    check_string("mode", mode)
    check_string("remainder", remainder)
    check_choice("mode", mode, MODES)
    check_choice("remainder", remainder, REMAINDERS)
    if remainder != "drop" and mode != "reshape":
        raise ValueError(f"remainder={remainder!r} needs mode='reshape', got mode={mode!r}")
    if keep_last_token and mode != "truncate":
        raise ValueError(f"keep_last_token needs mode='truncate', got mode={mode!r}")
    if mode == "truncate":
        return "truncate_keep_last" if keep_last_token else "truncate"
    return "flatten" if mode == "flatten" else f"reshape_{remainder}"


def check_seq_dim(seq_dim: int) -> None:
    if check_int("seq_dim", seq_dim) not in (0, 1):
        raise ValueError(f"seq_dim must be 1 for (batch, sequence, ...) or 0 for (sequence, batch, ...), got {seq_dim}")


def check_string(argument: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a string, got {type(value).__name__}")


def check_name_arguments(pad_values: object, keys: object, mask_keys: object) -> None:
    """`pad_values` must be a mapping, `keys` and `mask_keys` collections. Each may be None.

    An iterator is refused: the first of many readers would use it up.
    """
    if pad_values is not None and type(pad_values) is not dict and not isinstance(pad_values, Mapping):
        raise TypeError(f"pad_values must be a mapping of names to numbers, got {type(pad_values).__name__}")
    for argument, names in (("keys", keys), ("mask_keys", mask_keys)):
        if names is None or type(names) in _USUAL_COLLECTIONS:  # the check against a protocol takes microseconds
            continue
        if isinstance(names, str):
            raise TypeError(f"{argument} must be a collection of names, got the string {names!r}")
        if not isinstance(names, Collection) or isinstance(names, bytes) or hasattr(names, "__array__"):
            raise TypeError(f"{argument} must be a collection of names, such as a list, got {type(names).__name__}")


def check_names(argument: str, names: Collection[str] | None, batch: Mapping[str, object]) -> None:
    """All `names` must be names of tensors in the batch, or of lists with an entry for each row."""
    for name in () if names is None else names:
        if not isinstance(name, Hashable):
            raise TypeError(f"{argument} must be a collection of names, got {name!r} in it")
        if not isinstance(batch.get(name), Tensor) and not is_list(batch.get(name)):
            raise ValueError(f"{argument} names {name!r}, the tensors of the batch are {tensor_names(batch)}")


def check_keys(keys: Collection[str] | None, batch: Mapping[str, object]) -> None:
    if keys is not None and not keys:
        raise ValueError("keys must name at least one tensor of the batch, got none")
    check_names("keys", keys, batch)


def is_list(value: object) -> bool:
    return type(value) in (list, tuple)


def tensor_names(batch: Mapping[str, object]) -> list[str]:
    return [name for name, value in batch.items() if isinstance(value, Tensor)]


def batch_layout(
    batch: Mapping[str, Any],
    *,
    mode: str,
    seq_dim: int,
    keys: Collection[str] | None,
    mask_keys: Collection[str] | None,
    dtensors: bool = False,
) -> Layout:
    """Which tensors are resized and how, and their common batch size and sequence length. DTensors only on request."""
    check_seq_dim(seq_dim)
    check_name_arguments(None, keys, mask_keys)
    check_keys(keys, batch)
    check_names("mask_keys", mask_keys, batch)
    taking_part = {
        name: value
        for name, value in batch.items()
        if isinstance(value, Tensor) and value.dim() > 0 and (keys is None or name in keys)
    }
    for name, tensor in taking_part.items():
        check_dense(f"batch[{name!r}]", tensor)
        if is_dtensor(tensor) and not dtensors:
            raise TypeError(
                f"batch[{name!r}] must be the plain tensor of this rank, got a DTensor: resize its to_local(), or the "
                "batch before it is distributed"
            )
    kinds = {name: _kind(name, tensor, seq_dim, mask_keys) for name, tensor in taking_part.items()}
    if mask_keys is None and seq_dim == 1 and not torch.compiler.is_compiling():
        _warn_of_pairs(taking_part, kinds)
    _check_supported(taking_part, kinds, mode, seq_dim)
    batch_size, source_length = _common_sizes(taking_part, kinds, seq_dim)
    if mode == "truncate":  # the number of rows does not change, so a vector of any length is kept
        kinds = {n: kind for n, kind in kinds.items() if kind != Kind.ROW or len(taking_part[n]) == batch_size}
    _check_rows(taking_part, kinds, batch_size)
    check_one_device(taking_part)
    _check_arrays(batch, (batch_size, source_length)[: 2 if mode == "truncate" else 1], keys)
    lists = [] if mode == "truncate" else row_lists(batch, keys, batch_size)
    if lists and mode == "flatten":
        raise _no_place(lists[0], f"of {batch_size} entries")
    return Layout(batch_size, source_length, kinds, lists)


def _check_arrays(batch: Mapping[str, Any], sizes: tuple[int, ...], keys: Collection[str] | None) -> None:
    """Arrays of NumPy pass through, so none may have sizes that change."""
    for name, value in batch.items():
        if isinstance(value, np.ndarray) and value.shape[: len(sizes)] == sizes and (keys is None or name in keys):
            raise TypeError(f"batch[{name!r}] must be a tensor to be resized, got an array of NumPy: torch.from_numpy")


def row_lists(batch: Mapping[str, Any], keys: Collection[str] | None, batch_size: int) -> list[str]:
    """Names of the lists and tuples that have an entry for each row."""
    lists = {name: value for name, value in batch.items() if is_list(value)}
    for name in keys or ():
        if name in lists and len(lists[name]) != batch_size:
            raise ValueError(
                f"keys names the list {name!r}: it must have {batch_size} entries, one for each row, got "
                f"{len(lists[name])}"
            )
    return [name for name, value in lists.items() if len(value) == batch_size and (keys is None or name in keys)]


def _no_place(name: str, what: str) -> ValueError:
    return ValueError(
        f"mode='flatten' cannot resize {name!r} {what}: it has an entry for each row, and new rows are cut from one "
        "stream of all rows; leave it out with keys=, or use mode='reshape'"
    )


def _kind(name: str, tensor: Tensor, seq_dim: int, mask_keys: Collection[str] | None) -> Kind:
    if tensor.dim() == 1:
        return Kind.ROW
    if is_square_mask(tensor) and is_mask(name, mask_keys):
        return Kind.SQUARE
    return Kind.LABEL if is_filled(name, tensor.dtype) else Kind.SEQUENCE


def is_filled(name: str, dtype: torch.dtype) -> bool:
    """Whether a token that is repeated must not count twice in the entry: labels and masks of the loss."""
    return holds_labels(name, dtype) or is_loss_mask(name)


def is_loss_mask(name: str) -> bool:
    return own_name(name) in LOSS_MASKS


def _warn_of_pairs(tensors: Mapping[str, Tensor], kinds: Mapping[str, Kind]) -> None:
    """Warn of entries that have the shape of pairs of tokens and not the name of a mask."""
    for name, tensor in tensors.items():
        if kinds[name] != Kind.SQUARE and is_square_mask(tensor) and not own_name(name).endswith("embeds"):
            _warn_once(
                f"batch[{name!r}] has as many features as tokens, and only its tokens are resized. If it holds pairs "
                "of tokens, name it in mask_keys, with the masks over pairs of tokens. Name only those there if it "
                "holds features"
            )


def own_name(path: object) -> str:
    """The last part of a path: "input_ids" of "encoder.input_ids"."""
    return str(path).rpartition(".")[2]


def is_label(name: str) -> bool:
    own = own_name(name)
    return own in _LABEL_NAMES or own.endswith(_LABEL_ENDINGS)


def counts_as_label(name: str) -> bool:
    """Also of "y" and "target_ids", which are labels in some batches and other tokens in others."""
    own = own_name(name)
    return is_label(name) or own == "y" or f"_{own}".endswith("_target_ids")


def holds_labels(name: str, dtype: torch.dtype) -> bool:
    """Whether the name counts as a label's, and the dtype can hold −100. "labels" hold labels in any dtype."""
    return counts_as_label(name) and (dtype.is_signed or _is_called_labels(name))


def _is_called_labels(name: str) -> bool:
    return f"_{own_name(name)}".endswith("_labels")


def is_mask(name: str, mask_keys: Collection[str] | None) -> bool:
    return f"_{own_name(name)}".endswith(("_mask", "_bias")) if mask_keys is None else name in mask_keys


def is_square_mask(tensor: Tensor) -> bool:
    """(B, S, S) or (B, 1, S, S)."""
    has_right_rank = tensor.dim() == 3 or (tensor.dim() == 4 and tensor.shape[1] == 1)
    return has_right_rank and tensor.shape[-1] == tensor.shape[-2]


def _check_supported(tensors: dict[str, Tensor], kinds: dict[str, Kind], mode: str, seq_dim: int) -> None:
    for name, kind in kinds.items():
        shape = tuple(tensors[name].shape)
        if kind == Kind.SQUARE and mode != "truncate":
            raise ValueError(
                f"mode={mode!r} cannot resize {name!r}: a mask {shape} over pairs of tokens would need a mask for "
                "each new row; drop it from the batch, or pass a (batch, sequence) mask"
            )
        if kind == Kind.SQUARE and seq_dim != 1:
            raise ValueError(f"seq_dim must be 1 with the mask {name!r} {shape} over pairs of tokens, got {seq_dim}")
        if kind == Kind.ROW and mode == "flatten":
            raise _no_place(name, str(shape))


def _common_sizes(tensors: dict[str, Tensor], kinds: dict[str, Kind], seq_dim: int) -> tuple[int, int]:
    """(B, S) of every tensor with a sequence dimension."""
    sizes = {}
    for name, kind in kinds.items():
        shape = tensors[name].shape
        if kind == Kind.SQUARE:
            sizes[name] = (shape[0], shape[-1])
        elif kind != Kind.ROW:
            sizes[name] = (shape[1 - seq_dim], shape[seq_dim])
    if not sizes:
        raise ValueError(
            f"batch must hold a tensor with a sequence dimension to resize, got {_describe(tensors) or 'none'}"
        )
    first = next(iter(sizes.values()))
    if any(size != first for size in sizes.values()):
        raise ValueError(
            "the tensors of batch must agree on batch size and sequence length, got "
            f"{_describe({name: tensors[name] for name in sizes})}; name those to resize with keys="
        )
    if first[1] == 0:
        raise ValueError(f"batch must have a sequence length of at least 1, got {_describe(tensors)}")
    return first


def _check_rows(tensors: dict[str, Tensor], kinds: dict[str, Kind], batch_size: int) -> None:
    for name, kind in kinds.items():
        if kind == Kind.ROW and tensors[name].shape[0] != batch_size:
            raise ValueError(
                f"mode='reshape' repeats {name!r} for each new row: it must have {batch_size} entries, one for each "
                f"row, got {tensors[name].shape[0]}; leave it out with keys="
            )


def check_one_device(tensors: dict[str, Tensor]) -> None:
    devices = {name: str(tensor.device) for name, tensor in tensors.items()}
    if len(set(devices.values())) > 1:
        raise ValueError(f"the tensors of batch must be on one device, got {devices}")


def _describe(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def row_mask_name(batch: Mapping[str, object], layout: Layout, seq_dim: int) -> str | None:
    """The name of the (B, S) attention mask of the batch, or None without one."""
    fitting = [name for name in _row_masks(batch, layout, seq_dim) if own_name(name) == _MASK]
    outermost = sorted(fitting, key=lambda name: str(name).count("."))
    return outermost[0] if outermost else None


def mask_names(batch: Mapping[str, object], layout: Layout, seq_dim: int) -> list[str]:
    """Names of the (B, S) attention masks of the tokens that are resized, such as "decoder_attention_mask".

    They are those that are resized. If none is, those that pass through beside input ids that are resized.
    """
    masks = _row_masks(batch, layout, seq_dim)
    beside = {f"{str(name).removesuffix(own)}{_MASK}" for name in layout.kinds for own in _MASKED_INPUTS}
    return [name for name in masks if name in layout.kinds] or [name for name in masks if name in beside]


def _row_masks(batch: Mapping[str, object], layout: Layout, seq_dim: int) -> list[str]:
    shape = (layout.batch_size, layout.source_length)
    return [
        name
        for name, value in batch.items()
        if own_name(name).endswith(_MASK)
        and own_name(name) != f"global_{_MASK}"  # says which tokens attend globally, and hides none
        and isinstance(value, Tensor)
        and tuple(value.shape) == (shape if seq_dim == 1 else shape[::-1])
    ]


def warn_of_unread_masks(batch: Mapping[str, object], source_length: int) -> None:
    """Warn of entries that are masks by their names, for tokens without a known (B, S) attention mask."""
    for name, value in batch.items():
        own = own_name(name)
        is_called_mask = own == "mask" or f"_{own}".endswith(_MASKS_OF_PADDING)
        if is_called_mask and isinstance(value, Tensor) and value.dim() > 1 and source_length in value.shape:
            _warn_once(
                "rows are cut from their first token on, also if they begin with padding, which is not looked for in "
                f"batch[{name!r}]. To cut each row from its first valid token on, resize a (batch, sequence) "
                "'attention_mask', 0 where a token is hidden, with the tokens. Or pad on the right"
            )


def warn_of_counts(names: Iterable[str]) -> None:
    """Warn of entries with one value for each row, or sequence, that count tokens or point at them."""
    for name in names:
        own = own_name(name)
        if own in _COUNT_NAMES or own.endswith(_COUNT_ENDINGS):
            _warn_once(
                f"batch[{name!r}] counts tokens of whole rows or points at them, by its name, and does not change when "
                "rows are cut: compute it from the resized batch, or rename it if it holds something else"
            )


def check_keep_last(rule: str, mask_name: str | None) -> None:
    if rule == "truncate_keep_last" and mask_name is None:
        raise ValueError(
            "keep_last_token needs an 'attention_mask' (batch, sequence) in the batch, to find each row's last token"
        )


def check_no_row_begins_masked(mask_name: str | None, attention_mask: Tensor) -> None:
    """Reads the (B, S) mask, and waits for its device: views of all rows begin at the same position."""
    _check_first_tokens(attention_mask, partial(_no_views, mask_name))


def check_masks_begin_together(masks: Mapping[str, Tensor]) -> None:
    """Reads (B, S) masks, and waits for their device: a row of all tensors is cut at one position."""
    for name, mask in masks.items():
        _check_first_tokens(mask, partial(_no_common_cut, name, list(masks)))


def check_not_additive(name: str, attention_mask: Tensor) -> None:
    """Reads a mask of numbers, and waits for its device: 0 hides a token, in a mask to add it keeps one."""
    if torch.compiler.is_compiling() or attention_mask.is_meta or not attention_mask.numel():
        return
    if (least := attention_mask.min().item()) < 0:
        raise ValueError(
            f"batch[{name!r}] must be 0 where a token is hidden, got {attention_mask.dtype} with {least}: of a mask to "
            f"be added to scores pass {own_name(name)} == 0"
        )


def _check_first_tokens(attention_mask: Tensor, message: Callable[[str], str]) -> None:
    """Rows without a valid token may begin anywhere."""
    if torch.compiler.is_compiling():  # a traced graph cannot branch on values
        hidden = (attention_mask[:, 0] == 0) & (attention_mask != 0).any(dim=1)
        torch._assert_async(~hidden.any(), message("a row"))
        return
    if attention_mask.is_meta or _all_nonzero(attention_mask.select(1, 0)):  # the usual batch
        return
    rows = ((attention_mask[:, 0] == 0) & (attention_mask != 0).any(dim=1)).nonzero().flatten().tolist()
    if rows:
        raise ValueError(message(f"row {rows[0]}"))


def _all_nonzero(vector: Tensor) -> bool:
    if len(vector) <= 64:
        return all(vector.tolist())  # 3 µs for 8 rows, where the reduction below takes 9
    return bool(vector.all())


def _no_views(mask_name: str | None, row: str) -> str:
    return (
        f"copy must be True where a row begins with padding: batch[{mask_name!r}] masks the first token of {row}, "
        "which is cut from its first valid token on, and views of all rows begin at the same position"
    )


def _no_common_cut(mask_name: str, mask_names: list[str], row: str) -> str:
    others = "a mask that is not called 'attention_mask'"
    if len(mask_names) > 1:
        others = f"one of {len(mask_names)} masks, {', '.join(mask_names)}"
    return (
        f"batch[{mask_name!r}] must begin with a valid token in each row, but masks the first token of {row}: it is "
        f"{others}, and a row of all tensors is cut at one place. Pad on the right, or resize the tensors of each mask "
        "by themselves, with keys= and the name 'attention_mask'"
    )


def check_no_gradient(name: str, tensor: Tensor) -> None:
    if tensor.requires_grad:
        raise ValueError(
            f"batch[{name!r}] requires a gradient, which a copy does not carry: detach it, or use views "
            "(copy=False with mode 'truncate')"
        )


def fill_value(
    name: str, kind: Kind, dtype: torch.dtype, pad_values: Mapping[str, float] | None, fills_labels: bool
) -> float:
    """The value of a slot without a source token: the caller's, else −100 for labels and 0 for other tensors."""
    if pad_values is not None and name in pad_values:
        given = pad_values[name]
    else:
        is_ignored_label = kind == Kind.LABEL and fills_labels and not is_loss_mask(name)
        given = _default_label(name, dtype) if is_ignored_label else 0
    if isinstance(given, Real) and not isinstance(given, (int, float)):
        given = int(given) if isinstance(given, Integral) else float(given)  # of NumPy
    if not isinstance(given, (bool, int, float)):
        raise TypeError(f"pad_values[{name!r}] must be a number, got {type(given).__name__}")
    if dtype == torch.bool:
        fits = given in (0, 1)
    elif dtype.is_floating_point or dtype.is_complex:
        fits = True
    else:
        limits = torch.iinfo(dtype)
        fits = given == given // 1 and limits.min <= given <= limits.max
    if not fits:
        raise ValueError(f"pad_values[{name!r}] must fit {dtype}, got {given}")
    return given


def _default_label(name: str, dtype: torch.dtype) -> int:
    """−100, unless the name or the dtype leaves open what the entry holds."""
    is_real = dtype.is_floating_point or dtype.is_complex
    if not is_label(name) or (is_real and not _is_called_labels(name)):
        raise ValueError(
            f"pad_values must have a value for {name!r} ({dtype}), which may hold labels: the value that the loss "
            f"leaves out, as cross_entropy does with {IGNORED_LABEL}; rename the entry if it holds no labels"
        )
    return IGNORED_LABEL


def check_storage(
    name: str, out: Mapping[str, Tensor], source: Tensor, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """The first elements of out[name] as a contiguous tensor of `shape`. Checks dtype and device of the storage."""
    storage = out.get(name)
    if not isinstance(storage, Tensor):
        raise ValueError(f"out must hold a tensor {name!r} to write to, its names are {list(out)}")
    if storage.dtype != source.dtype or storage.device != device:
        raise ValueError(
            f"out[{name!r}] must be {source.dtype} on {device}, got {storage.dtype} on {storage.device}"
            + ("; BatchBuffers read batches in pinned host memory" if storage.is_cuda else "")
        )
    return first_elements(f"out[{name!r}]", storage, shape)


def first_elements(name: str, storage: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The first elements of a contiguous tensor, as `shape`."""
    needed = torch.Size(shape).numel()
    if not storage.is_contiguous() or storage.numel() < needed:
        raise ValueError(
            f"{name} must be contiguous with at least {needed} elements for {tuple(shape)}, "
            f"got {storage.numel()}{'' if storage.is_contiguous() else ', not contiguous'}"
        )
    return storage.view(-1)[:needed].view(shape)


def check_no_overlap(carved: Mapping[str, Tensor], batch: Mapping[str, object]) -> None:
    """No output may share memory with an entry of the batch or with another output."""
    spans = [(f"out[{name!r}]", _span(tensor)) for name, tensor in carved.items()]
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    strided = {
        name: tensor for name, tensor in tensors.items() if tensor.layout == torch.strided and not is_dtensor(tensor)
    }
    inputs = [(f"batch[{name!r}]", _span(tensor)) for name, tensor in strided.items()]
    for index, (name, (start, stop)) in enumerate(spans):
        for other, (other_start, other_stop) in spans[:index] + inputs:
            if start < other_stop and other_start < stop:
                raise ValueError(f"{name} must not share memory with {other}")


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses from the first to past the last element of a tensor."""
    if tensor.numel() == 0:
        return 0, 0
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()
