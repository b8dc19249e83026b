"""The definition of `resize_packed` in plain PyTorch: an index map from new tokens to old ones."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..library import implement
from .schema import PackedKind, Pieces


class NewTokens(NamedTuple):
    """The tokens of the new batch. All tensors are (T')."""

    piece: Tensor
    slot: Tensor  # index within the piece
    source: Tensor  # index in the old batch


def new_tokens_of(pieces: Tensor, new_tokens: int) -> NewTokens:
    first = pieces[Pieces.FIRST]
    length = functional.pad(first, (0, 1), value=new_tokens).diff()
    piece = torch.repeat_interleave(length, output_size=new_tokens)
    slot = torch.arange(new_tokens, device=pieces.device) - first[piece]
    return NewTokens(piece, slot, pieces[Pieces.SOURCE, piece] + slot)


def resize(tensor: Tensor, pieces: Tensor, tokens: NewTokens, kind: int, fill_value: float) -> Tensor:
    """Resize one tensor of the batch."""
    if kind == PackedKind.SEQUENCE:
        return tensor[pieces[Pieces.SEQUENCE]]
    if kind == PackedKind.POSITION:
        return tensor[pieces[Pieces.START, tokens.piece] + tokens.slot]
    taken = tensor[tokens.source]
    beside = (-1, *[1] * (tensor.dim() - 1))
    if kind == PackedKind.INDEX:
        return tokens.piece.to(tensor.dtype).view(beside).expand_as(taken).contiguous()
    if kind == PackedKind.LABEL:
        repeated = tokens.slot < pieces[Pieces.REPEATED, tokens.piece]
        return torch.where(repeated.view(beside), taken.new_full((), fill_value), taken)  # masked_fill lacks dtypes
    return taken


def piece_info(pieces: Tensor, tokens: NewTokens, attention_mask: Tensor | None) -> list[Tensor]:
    """valid_lengths (P) int32, position_ids (T') int64, num_valid_tokens () int64."""
    valid = torch.ones_like(tokens.source, dtype=torch.bool)
    if attention_mask is not None:
        valid = attention_mask[tokens.source] != 0
    counts = functional.pad(valid.cumsum(0), (1, 0))  # valid tokens before each
    before_piece = counts[pieces[Pieces.FIRST]]
    lengths = torch.cat([before_piece, counts[-1:]]).diff().to(torch.int32)
    return [lengths, (counts[:-1] - before_piece[tokens.piece]).masked_fill(~valid, 0), counts[-1].clone()]


def resize_packed(
    inputs: list[Tensor],
    attention_mask: Tensor | None,
    pieces: Tensor,
    new_tokens: int,
    kinds: list[int],
    fill_values: list[float],
    return_info: bool,
) -> list[Tensor]:
    tokens = new_tokens_of(pieces, new_tokens)
    results = [
        resize(tensor, pieces, tokens, kind, fill_value)
        for tensor, kind, fill_value in zip(inputs, kinds, fill_values, strict=True)
    ]
    return results + piece_info(pieces, tokens, attention_mask) if return_info else results


implement("resize_packed", "reference", resize_packed)
