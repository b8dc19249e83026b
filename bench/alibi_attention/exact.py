"""Attention and its gradients in float64, block by block, for a few heads: what errors are measured against."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from seqwarm_kernels import alibi_slopes

from .problems import Problem

NAMES = ("out", "grad_query", "grad_key", "grad_value")
_MOST_SCORES = 2**25  # in a block: 256 MB for each of a handful of tensors


def attention(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, slopes: Tensor, *, causal: bool
) -> tuple[Tensor, ...]:
    """`NAMES`, for queries (G, N, L, D) of G heads that share the keys (N, L, D) of one."""
    length, scale = query.shape[2], query.shape[3] ** -0.5
    block = max(1, _MOST_SCORES // query[..., 0].numel())
    out, grad_query = torch.empty_like(query), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    place = torch.arange(length, device=query.device)
    for rows in place.split(block):
        distance = rows[:, None] - place
        scores = query[:, :, rows] @ key.mT * scale - slopes.view(-1, 1, 1, 1) * distance.abs()
        if causal:
            scores.masked_fill_(distance < 0, float("-inf"))
        weights = scores.softmax(-1)
        grad_weights = grad_out[:, :, rows] @ value.mT
        grad_scores = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
        out[:, :, rows] = weights @ value
        grad_query[:, :, rows] = grad_scores @ key * scale
        grad_key += (grad_scores.mT @ query[:, :, rows]).sum(0) * scale
        grad_value += (weights.mT @ grad_out[:, :, rows]).sum(0)
    return out, grad_query, grad_key, grad_value


class Expected:
    """The values of one problem for the first row, the first key head and the last, and their queries."""

    def __init__(self, problem: Problem, inputs: Sequence[Tensor], grad_out: Tensor) -> None:
        self._group = problem.heads // problem.key_heads
        self._key_heads = sorted({0, problem.key_heads - 1})
        slopes = alibi_slopes(problem.heads, device=grad_out.device).double()
        length = problem.segment_length or problem.length
        self._exact = []
        for key_head in self._key_heads:
            query, grad, key, value = (
                tensor.detach().double().unflatten(-2, (-1, length))
                for tensor in self._heads((inputs[0], grad_out, inputs[1], inputs[2]), key_head, queries=2)
            )
            exact = attention(query, key, value, grad, slopes[self._of(key_head)], causal=problem.causal)
            self._exact.append([tensor.flatten(-3, -2) for tensor in exact])

    def _of(self, key_head: int) -> slice:
        return slice(key_head * self._group, (key_head + 1) * self._group)

    def _heads(self, tensors: Sequence[Tensor], key_head: int, *, queries: int) -> list[Tensor]:
        """Of the first row: the heads of the first `queries` tensors that share a key head, that key head's else."""
        return [
            tensor[0, self._of(key_head)] if place < queries else tensor[0, key_head]
            for place, tensor in enumerate(tensors)
        ]

    def errors(self, out: Tensor, grads: Sequence[Tensor] = ()) -> dict[str, float]:
        """The largest distance over the largest value, for everything given."""
        worst: dict[str, float] = {}
        for key_head, exact in zip(self._key_heads, self._exact, strict=True):
            found = self._heads((out, *grads), key_head, queries=2)
            for name, tensor, value in zip(NAMES, found, exact, strict=False):
                error = ((tensor.double() - value).abs().max() / value.abs().max()).item()
                worst[name] = max(error, worst.get(name, 0.0))
        return worst
