"""Schema and fake implementation of `seqwarm::resize_batch` and `seqwarm::resize_batch_out`.

Arguments of both:

inputs         tensors of one batch. A ROW tensor is (B,); a SEQUENCE or LABEL tensor is (B, S, *features); a
               SQUARE tensor is (B, S, S). Any strides, any dtypes, one device.
attention_mask (B, S), nonzero where a token is valid; None when all are.
batch_size     B; source_length S; new_length L >= 1, lowered to S where it is larger.
rule           how new rows are cut from source rows, one of RULES.
kinds          a Kind for each input.
fill_values    for each input, the value of a slot without a source token.
return_info    append valid_lengths (B') int32, position_ids (B', L) int64, num_valid_tokens () int64.

`resize_batch` returns new contiguous tensors. `resize_batch_out` writes into `outputs`, whose shapes must be those of
`output_shapes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ..library import define

#: What each rule does with a row of S tokens, L at a time:
RULES = (
    "truncate",  # keep the first L
    "truncate_valid",  # keep L from the first valid token on, or the last L where fewer follow
    "truncate_keep_last",  # the same, but the last slot takes the last valid token when that one was cut
    "reshape_drop",  # floor(S / L) new rows, the tail is dropped
    "reshape_pad",  # ceil(S / L) new rows, the last one is filled up
    "reshape_overlap",  # ceil(S / L) new rows, the last one holds the last L tokens
    "flatten",  # all rows as one stream of B * S tokens, cut into rows of L, the tail is dropped
)


#: Rules that skip the masked tokens at the beginning of a row. They need the attention mask.
SKIPPING = ("truncate_valid", "truncate_keep_last")


class Kind(IntEnum):
    """How a tensor is resized. The C++ sources use the same numbers."""

    ROW = 0  # one entry for each row: repeated for each new row
    SEQUENCE = 1  # one entry for each token
    LABEL = 2  # as SEQUENCE, but the second copy of a duplicated token is filled, so that it counts once
    SQUARE = 3  # a mask over pairs of tokens: both of its sequence dimensions are cut


#: Padding in labels: torch.nn.functional.cross_entropy leaves it out of the loss.
IGNORED_LABEL = -100

#: Masks that are 0 where the loss leaves a token out: of TRL, of transformers' chat templates, of Megatron.
LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")

ARGUMENTS = (
    "Tensor[] inputs, Tensor? attention_mask, SymInt batch_size, SymInt source_length, SymInt new_length, "
    "str rule, int[] kinds, float[] fill_values, bool return_info"
)
BACKENDS = ("native", "triton", "reference")  # best first
LACKING = {"triton": (torch.complex128,)}  # wider than Triton's integers


def new_rows(batch_size: int, source_length: int, new_length: int, rule: str) -> int:
    """The number of rows of the new batch, B'."""
    if rule.startswith("truncate"):
        return batch_size
    if rule == "flatten":
        return batch_size * source_length // new_length
    if rule == "reshape_drop":
        return batch_size * (source_length // new_length)
    return batch_size * ((source_length + new_length - 1) // new_length)


def output_shapes(
    inputs: Sequence[Tensor], kinds: Sequence[int], rows: int, new_length: int, return_info: bool
) -> list[tuple[int, ...]]:
    """The shape of every output, including the info."""
    shapes: list[tuple[int, ...]] = []
    for tensor, kind in zip(inputs, kinds, strict=True):
        if kind == Kind.ROW:
            shapes.append((rows,))
        elif kind == Kind.SQUARE:
            shapes.append((rows, new_length, new_length))
        else:
            shapes.append((rows, new_length, *tensor.shape[2:]))
    if return_info:
        shapes += [(rows,), (rows, new_length), ()]
    return shapes


INFO_DTYPES = (torch.int32, torch.int64, torch.int64)


def allocate(
    inputs: list[Tensor],
    attention_mask: Tensor | None,
    batch_size: int,
    source_length: int,
    new_length: int,
    rule: str,
    kinds: list[int],
    fill_values: list[float],
    return_info: bool,
) -> list[Tensor]:
    """Uninitialized outputs. Also the fake implementation."""
    new_length = torch.sym_min(new_length, source_length)  # here, since `min` in traced code costs a recompile
    rows = new_rows(batch_size, source_length, new_length, rule)
    shapes = output_shapes(inputs, kinds, rows, new_length, return_info)
    like = next(tensor for tensor in [*inputs, attention_mask] if tensor is not None)
    dtypes = [tensor.dtype for tensor in inputs] + list(INFO_DTYPES if return_info else ())
    return [like.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]


def _fake_out(*arguments: object) -> None:
    """`resize_batch_out` returns nothing and allocates nothing."""


define("resize_batch", f"({ARGUMENTS}) -> Tensor[]", BACKENDS, fake=allocate)
define("resize_batch_out", f"({ARGUMENTS}, Tensor(a!)[] outputs) -> ()", BACKENDS, fake=_fake_out)
