"""The training script with another attention: `python -m experiments.with_attention eager ARGUMENTS OF THE SCRIPT`.

Other attentions than this package's also resize batches by Python's slicing.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import seqwarm_kernels as sw
from bench.alibi_attention.flex import alibi_score, block_mask

from .plan import PACKAGE
from .running import load_script


class Eager:
    """Two products and a softmax. The bias is stored for the longest rows, and sliced for shorter ones."""

    def __init__(self) -> None:
        self._bias = torch.empty(0, 0, 0)

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, causal: bool) -> Tensor:
        length = query.shape[2]
        if length > self._bias.shape[-1] or self._bias.dtype != query.dtype:
            self._bias = sw.alibi_bias(slopes, length, length, causal=causal).to(query.dtype)
        scores = query @ key.transpose(-1, -2) / math.sqrt(query.shape[3]) + self._bias[:, :length, :length]
        return torch.softmax(scores, dim=-1) @ value


class Flex:
    """FlexAttention, compiled again for each length."""

    def __init__(self) -> None:
        torch._dynamo.config.recompile_limit = 64  # the default of 8 is less than the lengths of a ramp
        self._attention = torch.compile(flex_attention, dynamic=False)
        self._mask = functools.cache(block_mask)
        self._penalise: Callable[..., Tensor] | None = None

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, slopes: Tensor, *, causal: bool) -> Tensor:
        if self._penalise is None:  # one function for all layers, since every function is compiled separately
            self._penalise = alibi_score(slopes, causal=False)  # right for causal attention too
        mask = self._mask(query.shape[2], query.device, causal=causal)
        return self._attention(query, key, value, score_mod=self._penalise, block_mask=mask)


ATTENTIONS: dict[str, Callable[[], Any]] = {PACKAGE: lambda: None, "eager": Eager, "flex": Flex}


def slice_batch(scheduler: sw.SequenceLengthScheduler, batch: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
    """Replaces `scheduler.resize`, as people write it by hand."""
    return {name: tensor[:, : scheduler.seq_length].contiguous() for name, tensor in batch.items()}


def main(attention: str, arguments: list[str]) -> int:
    """Train, and return the script's exit status."""
    implementation = ATTENTIONS[attention]()
    if implementation is not None:
        sw.SequenceLengthScheduler.resize = slice_batch  # type: ignore[method-assign, assignment]
    train = load_script().train
    records = train.main(arguments, attention=implementation)
    return train.DIVERGED if records[-1]["diverged"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
