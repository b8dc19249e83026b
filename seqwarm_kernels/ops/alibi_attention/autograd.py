"""Registers the backward of every backend's forward operator with autograd."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..call_kind import call_kind
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


def _gradients(
    run: Callable[..., tuple[Tensor, ...]], ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs, by the backward operator `run`."""
    *tensors, out, lse, log2_sum, ranges = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    remaining = iter(tensors)
    arguments = [
        next(remaining) if is_tensor else entry for entry, is_tensor in zip(ctx.arguments, ctx.is_tensor, strict=True)
    ]
    slopes_need_grad = ctx.needs_input_grad[3]
    *gradients, grad_slopes = run(grad_out, grad_lse, out, lse, log2_sum, ranges, slopes_need_grad, *arguments)
    without_gradient = [None] * (len(arguments) - _NUM_DIFFERENTIABLE)
    return (*gradients, grad_slopes if slopes_need_grad else None, *without_gradient)


def _backward(operator: str, backend: str) -> Any:
    run = overload(f"{operator}_backward", backend)

    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return _gradients(run, ctx, grad_out, grad_lse)

    return backward


class _WithoutDispatcher(torch.autograd.Function):
    """The same autograd for calls that need nothing else of the dispatcher. Takes two functions as last inputs."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        *arguments, run, ctx.run_backward = inputs
        outputs = run(*arguments)
        _setup_context(ctx, tuple(arguments), outputs)
        return outputs

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        return *_gradients(ctx.run_backward, ctx, grad_out, grad_lse), None, None


def without_dispatcher(
    operator: str, backend: str, run: Callable[..., Any], run_backward: Callable[..., Any]
) -> Callable[..., tuple[Tensor, ...]]:
    """The operator as a plain function, given its kernels, for calls without a mode, transform or subclass."""
    operator_backward = overload(f"{operator}_backward", backend)

    def backward(*arguments: Any) -> tuple[Tensor, ...]:
        """By the operator where it is asked for a second derivative, which it refuses, or where a mode is active."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or call_kind(*arguments[:2]) is None:
            return operator_backward(*arguments)
        return run_backward(*arguments)

    def call(*arguments: Any) -> tuple[Tensor, ...]:
        needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in arguments[:_NUM_DIFFERENTIABLE])
        # Excluded in the implementation of an operator that has an autograd of its own.
        if needs_grad and not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradOther):
            return _WithoutDispatcher.apply(*arguments, run, backward)
        return run(*arguments)

    return call


def _no_second_derivative(ctx: Any, *gradients: Tensor) -> None:
    """Refuse second derivatives. Without this, torch would warn and return wrong ones."""
    raise RuntimeError("alibi_attention has no second derivative: its gradients cannot be differentiated again")


def _keep_nothing(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    pass


for _operator in ("alibi_attention", "alibi_attention_varlen"):
    for _backend in BACKENDS:
        differentiable(_operator, _backend, _backward(_operator, _backend), _setup_context)
        differentiable(f"{_operator}_backward", _backend, _no_second_derivative, _keep_nothing)
