"""Verify on a converted model that ALiBi acts, that no other positions are left, and that its cache is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..utils.devices import to_float64
from ..utils.modules import (
    CACHE_NAMES,
    ExampleBatch,
    as_mapping,
    call_model,
    evaluation,
    forward_parameters,
    guess_batch,
    is_pretrained,
    text_of,
    with_same_token,
)
from .alibi_layer import AlibiHeads, AttentionCall, observe_calls
from .families.torch_nn import AlibiMultiheadAttention
from .report import Verification

_Paths = Mapping[nn.Module, str]  #: of the layers in the model

_LENGTH = 16
#: What a model's tokens are called. An encoder-decoder takes those of its decoder besides the others.
_TOKENS = ("inputs_embeds", "input_ids", "decoder_input_ids")
#: Largest rounding error relative to the largest value. Rounding errors accumulate over the layers before.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def probe(model: nn.Module, max_seq_length: int, example_batch: ExampleBatch | None) -> Verification:
    """Run the model in evaluation mode, without gradients: on an example, on the same token everywhere, on the last
    token of the example after a cache of the others, and if its forward takes `position_ids`, on the same token at the
    last positions before `max_seq_length`.
    """
    paths = {module: path for path, module in model.named_modules() if hasattr(module, "alibi")}
    layers = [module for module in paths if isinstance(module.alibi, AlibiHeads)]
    with evaluation(model):
        inputs = _inputs(model, min(_LENGTH, max_seq_length), example_batch)
        named = _by_name(model, inputs)
        text = text_of(model, named)
        same_token = with_same_token(inputs if text is named else text)
        (_, calls), (_, same_token_calls) = _run(model, inputs), _run(model, same_token)
    idle = [paths[layer] for layer in layers if not any(call.layer is layer for call in calls)]
    if idle:
        raise ValueError(f"ALiBi attention is never called in {', '.join(idle)}: pass an example_batch that calls it")
    position_errors = _position_errors(same_token_calls, None, paths, "")
    errors, effects = zip(*[_error_and_effect(call, paths[call.layer]) for call in calls], strict=True)
    cache_error = _cache_error(model, text, paths)
    # Last: an index beyond a table of positions would end all work on a GPU.
    shifted = _at_last_positions(model, same_token, max_seq_length)
    if shifted is not None:
        with evaluation(model):
            _, far = _run(model, shifted, f" with position_ids up to {max_seq_length - 1}")
        at = f" if their position_ids end at {max_seq_length - 1}"
        position_errors += _position_errors(same_token_calls, far, paths, at)
    return Verification(len(calls), max(errors), min(effects), max(position_errors), cache_error)


def _run(model: nn.Module, batch: ExampleBatch, at: str = "") -> tuple[Any, list[AttentionCall]]:
    """Run the model, and return its output and its calls of ALiBi attention."""
    calls: list[AttentionCall] = []
    try:
        with observe_calls(calls.append):
            output = call_model(model, batch)
    except Exception as error:
        raise ValueError(
            f"the verification could not run {type(model).__name__}{at}: {error}. If its inputs are the cause, pass "
            "example_batch"
        ) from error
    return output, calls


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
        raise ValueError(f"the verification has no inputs for the model: {error}") from error


def _position_errors(
    calls: list[AttentionCall], others: list[AttentionCall] | None, paths: _Paths, at: str
) -> list[float]:
    """Return the largest difference of equal tokens in each call: from those in `others`, or from the first token."""
    errors = []
    for number, (call, other) in enumerate(zip(calls, others or calls, strict=True)):
        pairs = [(call.query, other.query), (call.key, other.key), (call.value, other.value)]
        if others is None:
            pairs = [(tensor, tensor[:, :, :1]) for tensor, _ in pairs]
        error = max(_relative((one - other).abs().max(), one) for one, other in pairs)
        # Before the first call only matrix products round.
        dtype = call.query.dtype
        if error > (_TOLERANCE[dtype] if number else max(torch.finfo(dtype).eps, 1e-5)):
            raise ValueError(
                f"equal tokens differ by {error:.1e} in {paths[call.layer]}{at}: the model has positions besides ALiBi "
                "or scales by positions"
            )
        errors.append(error)
    return errors


def _at_last_positions(model: nn.Module, batch: ExampleBatch, max_seq_length: int) -> dict[str, Any] | None:
    """Return the batch by name, with `position_ids` that end before `max_seq_length`. None if the model takes none.

    Only models of transformers get them unasked: in other models the name may mean something else.
    """
    names = forward_parameters(model)
    if "position_ids" not in names:
        return None
    named = _by_name(model, batch)
    positions = named.get("position_ids")
    if positions is None:
        tokens = next((named[name] for name in ("input_ids", "inputs_embeds") if named.get(name) is not None), None)
        if tokens is None or not is_pretrained(model):
            return None
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(len(tokens), -1)
    shift = max_seq_length - 1 - int(positions.max())
    return named | {"position_ids": positions + shift} if shift > 0 else None


def _by_name(model: nn.Module, batch: ExampleBatch) -> dict[str, Any]:
    if isinstance(batch, Mapping):
        return dict(batch)
    return dict(zip(forward_parameters(model), as_mapping(batch).values(), strict=False))


def _cache_error(model: nn.Module, batch: Mapping[str, Any], paths: _Paths) -> float | None:
    """Return the largest difference of attention to the last token with and without a cache. None if there is none.

    The model gets the tokens of one row alone, as in generation, without padding.
    """
    names = forward_parameters(model)
    name = next((name for name in CACHE_NAMES if name in names), None)
    inputs = {key: value[:1] for key, value in batch.items() if key in _TOKENS and value is not None}
    is_complete = bool(inputs) and ("decoder_input_ids" in names) == ("decoder_input_ids" in inputs)
    if name is None or not is_complete or not is_pretrained(model):
        return None
    tokens = max(inputs, key=_TOKENS.index)
    first, last = inputs[tokens][:, :-1], inputs[tokens][:, -1:]
    with evaluation(model):
        start, _ = _run(model, inputs | {tokens: first, "use_cache": True, "return_dict": True}, " on its tokens alone")
        cache = getattr(start, name, None)
        if cache is None:
            return None
        _, whole = _run(model, inputs | {"use_cache": False}, " without a cache")
        _, cached = _run(model, inputs | {tokens: last, "use_cache": True, name: cache}, " with a cache")
    return max(_difference_by_cache(*calls, paths[calls[0].layer]) for calls in zip(whole, cached, strict=True))


def _difference_by_cache(whole: AttentionCall, cached: AttentionCall, path: str) -> float:
    error = _relative((cached.out[:, :, -1:] - whole.out[:, :, -1:]).abs().max(), whole.value)
    if not error <= _TOLERANCE[whole.query.dtype]:
        raise ValueError(
            f"the last token differs by {error:.1e} in {path} with and without a cache: generate() would be wrong"
        )
    return error


def _error_and_effect(call: AttentionCall, path: str) -> tuple[float, float]:
    slopes = call.slopes
    error, effect = (
        _relative((to_float64(call.out) - call.reference(other)).abs().max(), call.value)
        for other in (slopes, torch.zeros_like(slopes))
    )
    if not error <= _TOLERANCE[call.query.dtype]:
        raise ValueError(f"the output of {path} is off by {error:.1e} of its largest value: not ALiBi attention")
    if slopes.any() and not effect > 0:
        raise ValueError(f"the slopes of {path} have no effect")
    return error, effect


def _relative(difference: Tensor, to: Tensor) -> float:
    return difference.item() / to.abs().max().clamp(min=torch.finfo(to.dtype).tiny).item()
