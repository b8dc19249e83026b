"""Schema and fake implementation of `seqwarm::resize_packed`, and how sequences are cut into pieces.

A packed batch is one row of N sequences. Each sequence of the new batch is a piece of one of them.

Arguments:

inputs         tensors of one packed batch. SEQUENCE tensors are (N,), all others (T, *features). INDEX tensors hold
               integers, all others have any dtype.
attention_mask (T,), nonzero where a token is valid; None when all are. Read for the info alone.
pieces         (5, P) int64 on the device of the inputs, made by `cut_sequences`.
new_tokens     number of tokens in all pieces, T'.
kinds          a PackedKind for each input.
fill_values    for each input, the value of a repeated label.
return_info    append valid_lengths (P) int32, position_ids (T') int64, num_valid_tokens () int64.

The results are new contiguous tensors, (P,) or (T', *features).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..library import define
from ..resize_batch.schema import INFO_DTYPES


class PackedKind(IntEnum):
    """How a tensor is resized. The C++ source uses the same numbers."""

    SEQUENCE = 0  # one entry for each sequence: repeated for each of its pieces
    TOKEN = 1  # one entry for each token
    LABEL = 2  # as TOKEN, but a token that the piece before holds, too, is filled, so that it counts once
    POSITION = 3  # as TOKEN, but each piece takes the first entries of its sequence
    INDEX = 4  # the number of each token's piece


class Pieces(IntEnum):
    """The rows of `pieces`. The C++ source uses the same numbers."""

    FIRST = 0  # index of the first token in the new batch; does not fall
    SOURCE = 1  # index of the first token in the old batch
    START = 2  # index of the first token of its sequence in the old batch
    SEQUENCE = 3  # index of its sequence
    REPEATED = 4  # number of its first tokens that the piece before it holds, too


BACKENDS = ("native", "triton", "reference")  # best first
LACKING = {"triton": (torch.complex128,)}  # wider than Triton's integers


def cut_sequences(bounds: NDArray[np.int64], seq_len: int, rule: str) -> tuple[Tensor, NDArray[np.int64]]:
    """The pieces of each sequence, in order, and their boundaries.

    A sequence of at most `seq_len` tokens is one piece.

    Args:
        bounds: (N + 1,) int64, boundaries of the sequences.
        seq_len: largest number of tokens in a piece.
        rule: one of `ops.resize_batch.schema.RULES`. Pieces need no padding, so the last one is shorter under
            "reshape_pad" and "flatten".

    Returns:
        `pieces` (5, P), int64 in host memory, and boundaries (P + 1,), int64.
    """
    lengths = bounds[1:] - bounds[:-1]
    if bounds[0] != 0 or lengths.min(initial=0) < 0:  # addresses are computed from them
        raise ValueError(f"boundaries of a packed batch must begin with 0 and not fall, got {bounds.tolist()}")
    if rule.startswith("truncate"):
        counts = np.ones_like(lengths)
    elif rule == "reshape_drop":
        counts = np.maximum(lengths // seq_len, 1)
    else:
        counts = np.maximum(-(-lengths // seq_len), 1)
    sequence = np.arange(len(counts)).repeat(counts)
    start = bounds[sequence]
    offset = (np.arange(len(sequence)) - (counts.cumsum() - counts)[sequence]) * seq_len
    left = lengths[sequence] - offset
    repeated = np.zeros_like(left)
    if rule == "reshape_overlap":
        repeated = np.where(offset > 0, np.maximum(seq_len - left, 0), 0)
    new_bounds = np.zeros(len(sequence) + 1, np.int64)
    np.minimum(left + repeated, seq_len).cumsum(out=new_bounds[1:])
    pieces = np.stack([new_bounds[:-1], start + offset - repeated, start, sequence, repeated])
    return torch.from_numpy(pieces), new_bounds


def allocate(
    inputs: list[Tensor],
    attention_mask: Tensor | None,
    pieces: Tensor,
    new_tokens: int,
    kinds: list[int],
    fill_values: list[float],
    return_info: bool,
) -> list[Tensor]:
    """Uninitialized outputs. Also the fake implementation."""
    count = pieces.shape[1]
    outputs = [
        tensor.new_empty((count,) if kind == PackedKind.SEQUENCE else (new_tokens, *tensor.shape[1:]))
        for tensor, kind in zip(inputs, kinds, strict=True)
    ]
    if return_info:
        shapes: list[tuple[int, ...]] = [(count,), (new_tokens,), ()]
        outputs += [pieces.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, INFO_DTYPES, strict=True)]
    return outputs


define(
    "resize_packed",
    "(Tensor[] inputs, Tensor? attention_mask, Tensor pieces, SymInt new_tokens, int[] kinds, float[] fill_values, "
    "bool return_info) -> Tensor[]",
    BACKENDS,
    fake=allocate,
)
