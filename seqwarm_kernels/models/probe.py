"""The proof that ALiBi acts in a model, and that no other positions are left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import alibi_attention
from ..example_batch import ExampleBatch, as_given, as_mapping, call_model, guess_batch
from .heads import AlibiHeads, Call, observed
from .report import Proof
from .torch_nn import AlibiMultiheadAttention

_LENGTH = 16
#: Of the largest value: an error beyond is no rounding. A surgery gone wrong is off by 1 % and more in float32.
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
        runs = list(_runs(model, layers, min(_LENGTH, max_seq_length), example_batch))
    calls = [call for call in runs[0] if call.query.shape[2] > 1]
    idle = [paths[layer] for layer in layers if not any(call.layer is layer for call in calls)]
    if idle:
        raise ValueError(f"ALiBi attention is never called in {', '.join(idle)}: pass example_batch, or report a bug")
    leaks = [(leak, paths[call.layer]) for call in runs[1] for leak in [_leak(call)]]
    for leak, path in leaks:
        if leak > _TOLERANCE[runs[1][0].query.dtype]:
            raise ValueError(
                f"equal tokens differ by {leak:.1e} in {path}: the model has positions besides ALiBi; "
                "register_alibi the class that adds them, and replace it there"
            )
    errors, effects = zip(*[_error_and_effect(call, paths[call.layer]) for call in calls], strict=True)
    return Proof(len(calls), max(errors), min(effects), max(leak for leak, _ in leaks))


def _runs(
    model: nn.Module, layers: Sequence[nn.Module], length: int, example_batch: ExampleBatch | None
) -> Iterator[list[Call]]:
    inputs = _inputs(model, layers, length, example_batch)
    for prepare in (_as_it_is, _same_token):
        calls: list[Call] = []
        with observed(calls.append):
            if inputs is None:
                for layer in layers:
                    x = prepare(_random_input(layer, length))
                    layer(x, x, x)
            else:
                batch = {name: prepare(value) for name, value in as_mapping(inputs).items()}
                call_model(model, as_given(batch, inputs))
        yield calls


def _inputs(
    model: nn.Module, layers: Sequence[nn.Module], length: int, example_batch: ExampleBatch | None
) -> ExampleBatch | None:
    """None where each layer is tried by itself: PyTorch's own, whose inputs are known."""
    if example_batch is not None:
        return example_batch
    device = next(parameter.device for parameter in model.parameters())
    try:
        return guess_batch(model, 2, length, device)
    except ValueError:
        if all(isinstance(layer, AlibiMultiheadAttention) for layer in layers):
            return None
        raise


def _random_input(layer: Any, length: int) -> Tensor:
    weight = layer.out_proj.weight
    shape = (2, length) if layer.batch_first else (length, 2)
    return torch.randn(*shape, layer.embed_dim, device=weight.device, dtype=weight.dtype)


def _as_it_is(value: Any) -> Any:
    return value


def _same_token(value: Any) -> Any:
    """Masks and other things of one value stay what they are."""
    if isinstance(value, Tensor) and value.dim() > 1 and value.numel() > 0:
        return value[:1, :1].expand_as(value).contiguous()
    return value


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


def _leak(call: Call) -> float:
    return max(_share((tensor - tensor[:, :, :1]).abs().max(), tensor) for tensor in (call.query, call.key, call.value))


def _error_and_effect(call: Call, path: str) -> tuple[float, float]:
    heads: Any = call.layer.alibi
    exact, without = (
        alibi_attention(
            call.query.double(),
            call.key.double(),
            call.value.double(),
            slopes,
            causal=call.causal,
            scale=call.scale,
            window=call.window,
            skip_tolerance=0.0,
            backend="reference",
        )
        for slopes in (heads.slopes, torch.zeros_like(heads.slopes))
    )
    error, effect = (_share((call.out - other).abs().max(), call.value) for other in (exact, without))
    if not error <= _TOLERANCE[call.query.dtype]:
        raise ValueError(f"the output of {path} is off by {error:.1e} of its largest value: not ALiBi attention")
    if heads.slopes.any() and not effect > 0:
        raise ValueError(f"the slopes of {path} change nothing")
    return error, effect


def _share(difference: Tensor, of: Tensor) -> float:
    return (difference / of.abs().max().clamp(min=torch.finfo(of.dtype).tiny)).item()
