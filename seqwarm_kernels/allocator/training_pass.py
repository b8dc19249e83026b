"""Training passes with the same options as the training to come."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from ..utils.modules import ExampleBatch, call_model
from .distributed import end_iteration
from .snapshot import optimizers_of

LossFunction = Callable[[Any, Any], Tensor]


@dataclass
class TrainingPass:
    """Forward, loss, backward, and the optimizer step.

    The last output and loss are kept until the next forward has replaced them, as in a loop with variables for both.
    """

    model: nn.Module
    device: torch.device
    loss_fn: LossFunction | None
    autocast_dtype: torch.dtype | None
    optimizer: Optimizer | None
    grad_scaler: GradScaler | None
    max_grad_norm: float | None
    accumulation_steps: int
    _output: Any = None
    _loss: Tensor | None = None

    def __post_init__(self) -> None:
        self._states = [(each, set(each.state)) for each in optimizers_of(self.optimizer)]

    def forward_backward(self, batch: ExampleBatch) -> None:
        """Compute gradients. With accumulation, run twice: gradients exist in every pass after the first."""
        is_trained = any(parameter.requires_grad for parameter in self.model.parameters())
        self.model.zero_grad()
        for _ in range(min(self.accumulation_steps, 2)):
            with self._autocast():
                self._output = call_model(self.model, batch)
                self._loss = _default_loss(self._output) if self.loss_fn is None else self.loss_fn(self._output, batch)
            if is_trained:
                (self._loss if self.grad_scaler is None else self.grad_scaler.scale(self._loss)).backward()

    def step(self) -> None:
        """Run the optimizer step, also if gradients overflow. `GradScaler.step` would skip the step then."""
        if self.optimizer is None:
            return
        if self.grad_scaler is not None and self.grad_scaler.is_enabled():
            self.grad_scaler.unscale_(self.optimizer)
        if self.max_grad_norm is not None:
            parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
            torch.nn.utils.clip_grad_norm_(parameters, self.max_grad_norm)
        self.optimizer.step()
        if self.grad_scaler is not None:
            self.grad_scaler.update()

    def forget(self) -> None:
        """Free the last output, the gradients, and the optimizer state that the passes have made."""
        self._output = self._loss = None
        self.model.zero_grad()
        for optimizer, known in self._states:
            for parameter in optimizer.state.keys() - known:
                del optimizer.state[parameter]

    def discard(self) -> None:
        """Free everything that an interrupted pass has left behind."""
        end_iteration(self.model)
        self.forget()

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.autocast_dtype)


def _default_loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and _is_differentiable(leaf)]
    if not tensors:
        raise ValueError(
            f"loss_fn is needed: the output of the model must hold a floating-point tensor, got {type(output).__name__}"
        )
    return torch.stack([(tensor.abs() if tensor.is_complex() else tensor).float().mean() for tensor in tensors]).sum()


def _is_differentiable(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
