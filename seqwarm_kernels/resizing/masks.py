"""Attention masks: which of them tell where the rows of a batch begin, and what is read from them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..utils.devices import is_capturing
from .entry_names import own_name
from .layout import Layout

#: The mask of the tokens in the entries beside it. "decoder_attention_mask" is that of "decoder_input_ids".
_MASK, _MASKED_INPUTS = "attention_mask", ("input_ids", "inputs_embeds")


def row_mask_name(batch: Mapping[str, object], layout: Layout, seq_dim: int) -> str | None:
    """The name of the (B, S) attention mask of the batch, or None without one."""
    fitting = [name for name in _row_masks(batch, layout, seq_dim) if own_name(name) == _MASK]
    return min(fitting, key=lambda name: str(name).count("."), default=None)  # the outermost


def mask_names(batch: Mapping[str, object], layout: Layout, seq_dim: int) -> list[str]:
    """Names of the (B, S) attention masks of the tokens that are resized, such as "decoder_attention_mask".

    They are those that are resized. If none is, those that pass through beside input ids that are resized.
    """
    masks = _row_masks(batch, layout, seq_dim)
    beside = {f"{str(name).removesuffix(own)}{_MASK}" for name in layout.axes for own in _MASKED_INPUTS}
    return [name for name in masks if name in layout.axes] or [name for name in masks if name in beside]


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


def can_read(tensor: Tensor) -> bool:
    """Whether the host can read values, which may wait for a device: no graph is compiled or captured."""
    return not (torch.compiler.is_compiling() or tensor.is_meta or is_capturing(tensor.device))


def check_mask(name: str, mask: Tensor) -> None:
    """A mask must be 0 where a token is hidden. In a mask to be added to scores, 0 keeps a token.

    Integers must be 0 or 1: greater numbers would tell packed sequences.
    """
    if not can_read(mask) or not mask.numel() or mask.dtype == torch.bool or mask.is_complex():
        return
    least, largest = (value.item() for value in mask.aminmax())
    if least < 0 or (largest > 1 and not mask.is_floating_point()):
        wanted = "0 where a token is hidden" if mask.is_floating_point() else "0 or 1"
        raise ValueError(f"batch[{name!r}] must be {wanted}, got {mask.dtype} with {least if least < 0 else largest}")


def check_first_tokens(mask: Tensor, message: str) -> None:
    """Rows of a mask (B, S) must begin with a valid token, or have none."""
    is_traced = torch.compiler.is_compiling()  # a graph cannot branch on values
    if not is_traced and (mask.is_meta or all(mask.select(1, 0).tolist())):  # the usual batch
        return
    begins_masked = (mask[:, 0] == 0) & (mask != 0).any(dim=1)
    if is_traced:
        torch._assert_async(~begins_masked.any(), message)
    elif begins_masked.any():
        raise ValueError(f"{message}, got padding in row {begins_masked.int().argmax().item()}")
