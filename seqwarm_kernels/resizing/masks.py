"""Attention masks of the tokens that are resized."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor

from .entry_names import own_name, warn_once
from .layout import Layout

#: The mask of the tokens in the entries beside it. "decoder_attention_mask" is that of "decoder_input_ids".
_MASK, _MASKED_INPUTS = "attention_mask", ("input_ids", "inputs_embeds")
#: Endings of masks that may hide padding. "special_tokens_mask" and "loss_mask" are other things.
_MASKS_OF_PADDING = tuple(
    f"_{kind}_mask" for kind in ("padding", "pad", "attention", "attn", "att", "input", "src", "token", "valid")
)


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
            warn_once(
                "rows are cut from their first token on, also if they begin with padding, which is not looked for in "
                f"batch[{name!r}]. To cut each row from its first valid token on, resize a (batch, sequence) "
                "'attention_mask', 0 where a token is hidden, with the tokens. Or pad on the right"
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
