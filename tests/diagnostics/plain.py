"""An optimizer's statistics, computed in plain Python, and a small model to train."""

import math

import torch


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 3))


def train_step(model, optimizer):
    """One step. Returns the loss, and keeps the gradients."""
    optimizer.zero_grad()
    loss = model(torch.randn(4, 5, device=next(model.parameters()).device)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def numbers(tensors):
    return [value for tensor in tensors for value in tensor.double().flatten().tolist()]


def statistics(momentum, second_moment, gradients):
    """Returns variance_l1, variance_max, momentum_l1, momentum_max, grad_norm; None for those without numbers."""
    roots = [math.sqrt(value) for value in numbers(second_moment)]
    sizes = [abs(value) for value in numbers(momentum)]
    norm = math.sqrt(math.fsum(value * value for value in numbers(gradients))) if gradients else None
    sums = [[math.fsum(values), max(values)] if values else [None, None] for values in (roots, sizes)]
    return [*sums[0], *sums[1], norm]


def statistics_of(optimizer):
    """The statistics of an optimizer with torch's state names that is not wrapped."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = [optimizer.state[parameter] for parameter in parameters if parameter in optimizer.state]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    moments = [
        [state[name] for state in states for name in names if name in state]
        for names in (("exp_avg", "momentum_buffer"), ("exp_avg_sq", "square_avg"))
    ]
    return statistics(*moments, gradients)
