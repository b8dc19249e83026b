"""Trainings to monitor, and functions that read their optimizers by hand."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from seqwarm_kernels.demo.model import GPT, next_byte_loss
from seqwarm_kernels.diagnostics import moment_statistics


class Training:
    """A GPT, an AdamW optimizer, and one batch of random bytes (rows, length)."""

    def __init__(self, layers: int, heads: int, width: int, rows: int, length: int, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = GPT(layers, heads, width).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(256, (rows, length), device=device)
        self._batch = {"input_ids": tokens, "labels": tokens}
        self._autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def step(self) -> tuple[Tensor, Tensor]:
        """One step. Returns the loss, and the norm of the gradients before clipping; keeps the gradients."""
        self.optimizer.zero_grad()
        with self._autocast:
            loss = next_byte_loss(self.model(self._batch["input_ids"]), self._batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss.detach(), norm


def read_by_hand(optimizer: torch.optim.Optimizer) -> list[float]:
    """The numbers of TrainingMonitor, read tensor by tensor, each number with `.item()`."""
    variance_l1 = momentum_l1 = squares = 0.0
    variance_max = momentum_max = 0.0
    for state in optimizer.state.values():
        variance = state["exp_avg_sq"].sqrt()
        variance_l1 += variance.sum().item()
        variance_max = max(variance_max, variance.max().item())
        momentum_l1 += state["exp_avg"].abs().sum().item()
        momentum_max = max(momentum_max, state["exp_avg"].abs().max().item())
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            squares += parameter.grad.norm().item() ** 2
    return [variance_l1, variance_max, momentum_l1, momentum_max, squares**0.5]


def exact_statistics(optimizer: torch.optim.Optimizer) -> list[float]:
    """The same numbers, computed in float64."""
    states = list(optimizer.state.values())
    variance = [state["exp_avg_sq"].double().sqrt() for state in states]
    momentum = [state["exp_avg"].double().abs() for state in states]
    gradients = [parameter.grad.double() for group in optimizer.param_groups for parameter in group["params"]]
    return [
        sum(tensor.sum().item() for tensor in variance),
        max(tensor.max().item() for tensor in variance),
        sum(tensor.sum().item() for tensor in momentum),
        max(tensor.max().item() for tensor in momentum),
        sum(tensor.square().sum().item() for tensor in gradients) ** 0.5,
    ]


def relative_error(optimizer: torch.optim.Optimizer, found: Iterable[float]) -> float:
    """The largest of the numbers, beside `exact_statistics`."""
    return max(abs(value - exact) / exact for value, exact in zip(found, exact_statistics(optimizer), strict=True))


def read_fused(optimizer: torch.optim.Optimizer) -> list[float]:
    """The numbers of TrainingMonitor, as it reads them."""
    return [value.item() for value in moment_statistics(optimizer) if value is not None]
