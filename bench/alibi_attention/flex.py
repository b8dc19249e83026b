"""FlexAttention's score and mask of ALiBi, as formulas of positions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask


def alibi_score(slopes: Tensor, *, causal: bool) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return score - slopes[h] * (i - j if causal else (i - j).abs())

    return score_mod


def block_mask(
    length: int, device: torch.device, *, causal: bool, segment_length: int | None = None
) -> BlockMask | None:
    """None if every query sees every key."""

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if segment_length is None:
            return i >= j
        same = i // segment_length == j // segment_length
        return same & (i >= j) if causal else same

    if segment_length is None and not causal:
        return None
    return create_block_mask(visible, None, None, length, length, device=device.type)
