"""A problem with its inputs, the calls that are timed, and float64 results that errors are measured against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from seqwarm_kernels import alibi_slopes

from ..common.timing import Call
from .problems import Problem, draw

FORWARD, BACKWARD, BOTH = "forward", "backward", "forward + backward"
RESULT_NAMES = ("out", "grad_query", "grad_key", "grad_value")
_MOST_SCORES = 2**25  # in a block: 256 MB for each of a few tensors


def call_of(work: str, attend: Callable[..., Tensor], inputs: list[Tensor], grad_out: Tensor) -> Call:
    """The call to time for FORWARD, BACKWARD or BOTH."""
    if work == FORWARD:
        detached = [tensor.detach() for tensor in inputs]
        return lambda: attend(*detached)
    if work == BACKWARD:
        out = attend(*inputs)
        return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
    return lambda: torch.autograd.grad(attend(*inputs), inputs, grad_out)


class Case:
    """A problem with inputs of one kind. Inputs and float64 results are computed on first use."""

    def __init__(self, problem: Problem, kind: str, device: torch.device) -> None:
        self.problem, self.kind, self.device = problem, kind, device

    @functools.cached_property
    def inputs(self) -> list[Tensor]:
        return draw(self.problem, self.kind, self.device)

    @functools.cached_property
    def grad_out(self) -> Tensor:
        return torch.randn_like(self.inputs[0])

    @functools.cached_property
    def exact(self) -> ExactResults:
        return ExactResults(self.problem, self.inputs, self.grad_out)


def exact_attention(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor, slopes: Tensor, *, causal: bool
) -> tuple[Tensor, ...]:
    """Attention and its gradients in the inputs' dtype, block by block.

    Args:
        query: (G, N, L, D), for G heads that share one key head.
        key: (N, L, D).

    Returns:
        A tensor for each name of `RESULT_NAMES`.
    """
    length, scale = query.shape[2], query.shape[3] ** -0.5
    block = max(1, _MOST_SCORES // query[..., 0].numel())
    out, grad_query = torch.empty_like(query), torch.empty_like(query)
    grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
    positions = torch.arange(length, device=query.device)
    for rows in positions.split(block):
        distance = rows[:, None] - positions
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


class ExactResults:
    """Float64 results for the first row of a problem: its first and last key head, and the query heads they serve."""

    def __init__(self, problem: Problem, inputs: Sequence[Tensor], grad_out: Tensor) -> None:
        self._group = problem.heads // problem.key_heads
        self._key_heads = sorted({0, problem.key_heads - 1})
        slopes = alibi_slopes(problem.heads, device=grad_out.device).double()
        length = problem.segment_length or problem.length
        self._exact = []
        for key_head in self._key_heads:
            query, grad, key, value = (
                tensor.detach().double().unflatten(-2, (-1, length))
                for tensor in self._heads((inputs[0], grad_out, inputs[1], inputs[2]), key_head)
            )
            exact = exact_attention(query, key, value, grad, slopes[self._query_heads(key_head)], causal=problem.causal)
            self._exact.append([tensor.flatten(-3, -2) for tensor in exact])

    def _query_heads(self, key_head: int) -> slice:
        return slice(key_head * self._group, (key_head + 1) * self._group)

    def _heads(self, tensors: Sequence[Tensor], key_head: int) -> list[Tensor]:
        """The first row: the query heads of the first two tensors, and the key head of the others."""
        heads = self._query_heads(key_head)
        return [tensor[0, heads if index < 2 else key_head] for index, tensor in enumerate(tensors)]

    def errors(self, out: Tensor, grads: Sequence[Tensor] = ()) -> dict[str, float]:
        """Largest distance divided by the largest value, for each passed tensor."""
        worst: dict[str, float] = {}
        for key_head, exact in zip(self._key_heads, self._exact, strict=True):
            found = self._heads((out, *grads), key_head)
            for name, tensor, value in zip(RESULT_NAMES, found, exact, strict=False):
                error = ((tensor.double() - value).abs().max() / value.abs().max()).item()
                worst[name] = max(error, worst.get(name, 0.0))
        return worst
