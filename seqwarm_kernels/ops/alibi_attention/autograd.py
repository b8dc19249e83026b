"""Registers the backward of every backend's forward operator with autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..library import differentiable, overload
from .schema import BACKENDS

_NUM_DIFFERENTIABLE = 4  # query, key, value and slopes come first


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = [entry for entry in inputs if isinstance(entry, Tensor)]
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(*output[2:])
    ctx.set_materialize_grads(False)  # no zeros for an lse that is not used
    ctx.arguments = [None if isinstance(entry, Tensor) else entry for entry in inputs]
    ctx.is_tensor = [isinstance(entry, Tensor) for entry in inputs]


def _backward(operator: str, backend: str) -> Any:
    run = overload(f"{operator}_backward", backend)

    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        *tensors, out, lse, log2_sum, ranges = ctx.saved_tensors
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        remaining = iter(tensors)
        arguments = [
            next(remaining) if is_tensor else entry
            for entry, is_tensor in zip(ctx.arguments, ctx.is_tensor, strict=True)
        ]
        slopes_need_grad = ctx.needs_input_grad[3]
        *gradients, grad_slopes = run(grad_out, grad_lse, out, lse, log2_sum, ranges, slopes_need_grad, *arguments)
        without_gradient = [None] * (len(arguments) - _NUM_DIFFERENTIABLE)
        return (*gradients, grad_slopes if slopes_need_grad else None, *without_gradient)

    return backward


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    """Refuse second derivatives. Without this, torch would warn and return wrong ones."""
    raise RuntimeError("alibi_attention has no second derivative: its gradients cannot be differentiated again")


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


for _operator in ("alibi_attention", "alibi_attention_varlen"):
    for _backend in BACKENDS:
        differentiable(_operator, _backend, _backward(_operator, _backend), _setup_context)
        differentiable(f"{_operator}_backward", _backend, _no_second_derivative, _keep_nothing)
