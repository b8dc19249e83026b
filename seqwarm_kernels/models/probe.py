"""The proof that ALiBi acts in a model, and that no other positions are left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..utils.modules import ExampleBatch, as_given, as_mapping, call_model, guess_batch
from .alibi_layer import AlibiHeads, Call, observed
from .families.torch_nn import AlibiMultiheadAttention
from .report import Proof

_LENGTH = 16
#: Of the largest value: an error beyond is none of rounding, which piles up over the layers in front.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def probe(model: nn.Module, max_seq_length: int, example_batch: ExampleBatch | None) -> Proof:
    """Run the model twice, in evaluation mode, without gradients: on any tokens, and on the same token everywhere.

    Raises:
        ValueError: a layer is never called, its output is not that of ALiBi attention, its slopes change nothing, or
            equal tokens look different at different positions: something else still tells them.
    """
    paths = {module: path for path, module in model.named_modules() if hasattr(module, "alibi")}
    layers = [module for module in paths if isinstance(module.alibi, AlibiHeads)]
    with _quiet(model):
        inputs = _inputs(model, min(_LENGTH, max_seq_length), example_batch)
        calls, same_token_calls = (_run(model, batch) for batch in (inputs, _same_token(inputs)))
    idle = [paths[layer] for layer in layers if not any(call.layer is layer for call in calls)]
    if idle:
        raise ValueError(
            f"ALiBi attention is never called in {', '.join(idle)}: pass an example_batch that goes through it"
        )
    leaks = [_leak(call, paths[call.layer], is_first=number == 0) for number, call in enumerate(same_token_calls)]
    errors, effects = zip(*[_error_and_effect(call, paths[call.layer]) for call in calls], strict=True)
    return Proof(len(calls), max(errors), min(effects), max(leaks))


def _run(model: nn.Module, batch: ExampleBatch) -> list[Call]:
    calls: list[Call] = []
    try:
        with observed(calls.append):
            call_model(model, batch)
    except Exception as error:
        raise ValueError(
            f"the proof that ALiBi acts could not run {type(model).__name__}: {error}. If its inputs are at fault, "
            "pass example_batch"
        ) from error
    return calls


def _inputs(model: nn.Module, length: int, example_batch: ExampleBatch | None) -> ExampleBatch:
    if example_batch is not None:
        return example_batch
    parameter = next(model.parameters())
    if isinstance(model, (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)):
        width = next(module.embed_dim for module in model.modules() if isinstance(module, AlibiMultiheadAttention))
        x = torch.randn(2, length, width, device=parameter.device, dtype=parameter.dtype)
        return (x, x, x) if isinstance(model, nn.MultiheadAttention) else x
    try:
        return guess_batch(model, 2, length, parameter.device)
    except Exception as error:
        raise ValueError(f"the proof that ALiBi acts does not know what to call the model with: {error}") from error


def _same_token(batch: ExampleBatch) -> ExampleBatch:
    """The first token everywhere. Positions that a caller gives stay: they must not matter."""
    same: dict[str, Any] = {}  # one for each tensor: what is one object stays one
    for name, value in as_mapping(batch).items():
        is_sequence = isinstance(value, Tensor) and value.dim() > 1 and value.numel() > 0
        if is_sequence and "position" not in name:
            value = same.setdefault(str(id(value)), value[:1, :1].expand_as(value).contiguous())
        same[name] = value
    return as_given({name: same[name] for name in as_mapping(batch)}, batch)


@contextmanager
def _quiet(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, no gradients; modes and random numbers are afterwards what they were."""
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.is_cuda}
    try:
        with torch.random.fork_rng(devices=list(devices)), torch.no_grad():
            torch.manual_seed(0)
            model.eval()
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _leak(call: Call, path: str, is_first: bool) -> float:
    """Nothing is in front of the first call that could round equal tokens apart, but products of matrices."""
    leak = max(_share((tensor - tensor[:, :, :1]).abs().max(), tensor) for tensor in (call.query, call.key, call.value))
    dtype = call.query.dtype
    if leak > (max(torch.finfo(dtype).eps, 1e-5) if is_first else _TOLERANCE[dtype]):
        raise ValueError(
            f"equal tokens differ by {leak:.1e} in {path}: the model has positions besides ALiBi; "
            "register_alibi the class that adds them, and replace it there"
        )
    return leak


def _error_and_effect(call: Call, path: str) -> tuple[float, float]:
    heads: Any = call.layer.alibi
    slopes = heads.slopes
    error, effect = (
        _share((call.out - call.exact(other)).abs().max(), call.value) for other in (slopes, torch.zeros_like(slopes))
    )
    if not error <= _TOLERANCE[call.query.dtype]:
        raise ValueError(f"the output of {path} is off by {error:.1e} of its largest value: not ALiBi attention")
    if slopes.any() and not effect > 0:
        raise ValueError(f"the slopes of {path} change nothing")
    return error, effect


def _share(difference: Tensor, of: Tensor) -> float:
    return (difference / of.abs().max().clamp(min=torch.finfo(of.dtype).tiny)).item()
