"""How a model is told what limits its attention: the segments or the window of a batch that keeps its shape."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ..utils.modules import call_model, evaluation, forward_parameters, guess_batch
from ..utils.shifted_labels import shifts_labels
from .functional import resize_batch
from .options import KEEPING_SHAPE

#: Parts of the names of attentions of transformers that read `cu_seq_lens_q`. Others read `position_ids`.
_OF_BOUNDARIES = ("flash", "seqwarm")
#: Tokens of the example by which a model is tested.
_TOKENS = 4
#: Of the change of the token itself. Experts round differently when other tokens change their rows: by 1e-7 of it in
#: float32. Untrained models that do not keep tokens apart change others by 4e-3 of it and more.
_ROUNDING = 1e-3


def options_for(model: nn.Module, options: Mapping[str, Any], *, by_rows: bool = False) -> dict[str, Any]:
    """The options of `resize_batch` for a model, with the `boundaries` that it reads and the labels that it uses.

    A model of transformers is run on four tokens, each in a segment of its own, to see whether it keeps them apart.
    Given `boundaries`, and the parameters of other models, are trusted. `by_rows`: the model gets some rows of a batch
    at a time, in one argument, so that boundaries over all rows cannot be told.

    Raises:
        ValueError: The model cannot be told, or does not keep the tokens apart.
    """
    mode, found = options.get("mode"), dict(options)
    if mode not in KEEPING_SHAPE:
        return found
    inner, own = _model_of_transformers(model), forward_parameters(model)
    if mode == "segments":
        found.setdefault("keep_first_labels", not shifts_labels(inner or model))
    if options.get("boundaries") is not None or (mode == "window" and "window" in own):
        return found
    if mode == "segments" and "segment_length" in own:
        return {**found, "boundaries": "segment_length"}
    if mode == "segments" and "cu_seq_lens_q" in own:
        return {**found, "boundaries": "cu_seq_lens"}
    if inner is None:
        needed = "window" if mode == "window" else "segment_length or cu_seq_lens_q"
        raise ValueError(f"mode={mode!r} needs a forward with {needed}, or a model of transformers, got {_name(model)}")
    if mode == "segments":
        attention: str = inner.config._attn_implementation  # transformers has no public name of it
        reads_boundaries = not by_rows and any(part in attention for part in _OF_BOUNDARIES)
        found["boundaries"] = "cu_seq_lens" if reads_boundaries else "position_ids"
    _check_apart(model if by_rows else inner, inner, mode, found.get("boundaries"))
    return found


def _check_apart(model: nn.Module, inner: nn.Module, mode: str, boundaries: str | None) -> None:
    """Run a model twice on tokens that must not see each other, of which the first one differs.

    `inner` is the model of transformers in it, by which the tokens are made.
    """
    told = f"segments by {boundaries}" if mode == "segments" else "a window"
    try:
        with evaluation(model), torch.compiler.set_stance("force_eager"):
            device = next(model.parameters()).device
            batch: Any = {**guess_batch(inner, 1, _TOKENS, device)}
            batch.pop("labels", None)
            keys = [name for name, value in batch.items() if value.shape == (1, _TOKENS)]
            batch = resize_batch(batch, 1, mode=mode, boundaries=boundaries, keys=keys)
            changed = batch["input_ids"].clone()
            changed[:, 0] = changed[:, 0] == 0  # token 1 for token 0, token 0 for any other
            first, second = (
                _output(call_model(model, {**batch, "input_ids": ids})) for ids in (batch["input_ids"], changed)
            )
    except Exception as error:
        raise ValueError(f"{_name(model)} cannot be told {told}: {error}") from error
    change = (first - second).abs().amax((0, 2))
    if (change[1:] > _ROUNDING * change[0]).any():
        raise ValueError(f"{_name(model)} cannot be told {told}: its tokens still see all tokens before")


def _output(output: Any) -> Tensor:
    """The logits, or the hidden states, of each token."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.shape[1:2] == (_TOKENS,)]
    return next(tensor for tensor in tensors if tensor.is_floating_point())


def require_told(model: nn.Module, options: Mapping[str, Any]) -> RemovableHandle | None:
    """Let the model of transformers in `model` raise in training if a call does not pass it what limits its attention.

    A `training_step` or a wrapper that picks entries of the batch would drop it, and train on whole rows.
    """
    inner = _model_of_transformers(model)
    if options.get("mode") not in KEEPING_SHAPE or inner is None:
        return None
    by_boundaries = "cu_seq_lens_q" if options.get("boundaries") == "cu_seq_lens" else "position_ids"
    name = "window" if options["mode"] == "window" else by_boundaries
    handle: RemovableHandle = inner.register_forward_pre_hook(_Required(name), with_kwargs=True)
    return handle


class _Required:
    """A forward pre-hook. That of a copied or pickled model requires nothing, since nothing is attached to it."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return _Required, ()

    def __call__(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if torch.compiler.is_compiling() or self.name is None or self.name in kwargs:
            return
        if model.training and torch.is_grad_enabled():
            raise ValueError(f"the model must get all entries of a resized batch; {self.name!r} is missing")


def names_not_taken(model: nn.Module, options: Mapping[str, Any]) -> list[str]:
    """Entries that `resize_batch` adds with these options, and that the model's forward does not take."""
    if options.get("mode") not in KEEPING_SHAPE or _model_of_transformers(model) is not None:
        return []
    own = forward_parameters(model)
    takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in own.values())
    names = [] if takes_all or options.get("boundaries") == "position_ids" else ["position_ids"]
    return [name for name in ("use_cache", *names) if name not in own]


def without(resized: Any, names: Collection[str], batch: Any) -> Any:
    """A resized batch without the entries `names`, unless they were in the batch."""
    for name in names:
        if name not in batch:
            resized.pop(name, None)
    return resized


def _model_of_transformers(model: nn.Module) -> Any:
    """The outermost model of transformers in a model, or None."""
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return None
    return next((module for module in model.modules() if isinstance(module, library.PreTrainedModel)), None)


def _name(model: nn.Module) -> str:
    return type(model).__name__
