"""How a model is told what limits its attention: the segments or the window of a batch that keeps its shape."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..utils.checks import is_dtensor
from ..utils.modules import call_model, evaluation, forward_parameters, guess_batch, is_pretrained, shifts_labels
from .functional import resize_batch
from .options import KEEPING_SHAPE

#: Parts of the names of attentions of transformers that read `cu_seq_lens_q`. Others read `position_ids`.
_OF_BOUNDARIES = ("flash", "seqwarm")
#: Tokens of the example by which a model is tested.
_TOKENS = 4
#: Of the change of the token itself. Experts round differently when other tokens change their rows: by 1e-7 of it in
#: float32. Untrained models that do not keep tokens apart change others by 4e-3 of it and more.
_ROUNDING = 1e-3


class Told:
    """What `resize_batch` does for one model: its options, the entries that the model takes, and those it must get.

    A model of transformers is run on four tokens, each in a segment of its own, to see whether it keeps them apart.
    Given `boundaries`, and the parameters of other models, are trusted.

    Args:
        options: Of `resize_batch`.
        by_rows: The model gets some rows of a batch at a time, in one argument, so that boundaries over all rows cannot
            be told.

    Attributes:
        options: With the `boundaries` that the model reads, and the labels that it uses.

    Raises:
        ValueError: The model cannot be told, or does not keep the tokens apart.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any], *, by_rows: bool = False) -> None:
        self.options = dict(options)
        self._not_taken: list[str] = []  # of what these options add to a batch
        self._inner: list[Any] = []  # models of transformers
        mode = options.get("mode")
        if mode not in KEEPING_SHAPE:
            return
        self._inner = _pretrained(model)
        own = forward_parameters(model)
        if mode == "segments":
            self.options.setdefault("keep_first_labels", not shifts_labels(next(iter(self._inner), model)))
        if options.get("boundaries") is None and not (mode == "window" and "window" in own):
            self._choose_boundaries(model, own, mode, by_rows)
        takes_all = any(parameter.kind == inspect.Parameter.VAR_KEYWORD for parameter in own.values())
        if not self._inner:
            are_read = takes_all or self.options.get("boundaries") == "position_ids"
            names = ("use_cache",) if are_read else ("use_cache", "position_ids")
            self._not_taken = [name for name in names if name not in own]

    def _choose_boundaries(self, model: nn.Module, own: Collection[str], mode: str, by_rows: bool) -> None:
        if mode == "segments" and "segment_length" in own:
            self.options["boundaries"] = "segment_length"
        elif mode == "segments" and "cu_seq_lens_q" in own:
            self.options["boundaries"] = "cu_seq_lens"
        elif not self._inner:
            needed = "window" if mode == "window" else "segment_length or cu_seq_lens_q"
            raise ValueError(
                f"mode={mode!r} needs a forward with {needed}, or a model of transformers, got {type(model).__name__}"
            )
        else:
            if mode == "segments":  # transformers has no public name of a model's attention
                attentions = [inner.config._attn_implementation for inner in self._inner]
                read = any(part in attention for attention in attentions for part in _OF_BOUNDARIES)
                self.options["boundaries"] = "cu_seq_lens" if read and not by_rows else "position_ids"
            for inner in self._inner:
                _check_apart(model if by_rows else inner, inner, self.options)

    def strip(self, resized: Any, batch: Any) -> Any:
        """A resized batch without what was added to it and the model's forward does not take."""
        for name in self._not_taken:
            if name not in batch:
                resized.pop(name, None)
        return resized

    def require(self) -> Requirement:
        """What raises if a resized call does not pass to models of transformers what limits their attention."""
        told_by = self.options.get("boundaries") or "window"
        return Requirement(told_by, [] if told_by == "segment_length" else self._inner)


def _pretrained(model: nn.Module) -> list[nn.Module]:
    """The models of transformers in a model that are not parts of others."""
    if is_pretrained(model):
        return [model]
    return list(dict.fromkeys(inner for child in model.children() for inner in _pretrained(child)))


def _check_apart(model: nn.Module, inner: nn.Module, options: Mapping[str, Any]) -> None:
    """Run a model twice on tokens that must not see each other, of which the first one differs.

    `inner` is the model of transformers in it, by which the tokens are made.
    """
    mode, boundaries = options["mode"], options.get("boundaries")
    told = f"segments by {boundaries}" if mode == "segments" else "a window"
    try:
        with evaluation(model), torch.compiler.set_stance("force_eager"):
            device = next(model.parameters()).device
            batch: Any = {**guess_batch(inner, 1, _TOKENS, device)}
            if model is inner:  # else its forward may need them
                batch.pop("labels", None)
            keys = [name for name, value in batch.items() if value.shape == (1, _TOKENS)]
            batch = resize_batch(batch, 1, mode=mode, boundaries=boundaries, keys=keys)
            changed = batch["input_ids"].clone()
            changed[:, 0] = changed[:, 0] == 0  # token 1 for token 0, token 0 for any other
            with _nothing_zero(model):
                first, second = (
                    _output(call_model(model, {**batch, "input_ids": ids})) for ids in (batch["input_ids"], changed)
                )
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be told {told}: {error}") from error
    change = (first - second).abs().amax((0, 2))
    if (change[1:] > _ROUNDING * change[0]).any():
        raise ValueError(f"{type(model).__name__} cannot be told {told}: its tokens still see all tokens before")


def _output(output: Any) -> Tensor:
    """The logits, or the hidden states, of each token."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.shape[1:2] == (_TOKENS,)]
    found = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    if found is None:
        raise ValueError("its output has nothing for each token")
    return found


@contextmanager
def _nothing_zero(model: nn.Module) -> Iterator[None]:
    """Random values in matrices that are zero, as projections often begin: behind them no token would see another."""
    matrices = (each for each in model.parameters() if each.dim() > 1 and each.is_floating_point())
    zero = [each for each in matrices if not is_dtensor(each) and not each.any()]
    try:
        for parameter in zero:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)
        yield
    finally:
        for parameter in zero:
            parameter.zero_()


class Requirement:
    """A forward pre-hook of models. A wrapper or a `training_step` that picks entries would train on whole rows.

    That of a copied or pickled model requires nothing, since nothing is attached to it.

    Attributes:
        is_resizing: Whether the last call was resized. A model's `training` does not say it: it is loaded in evaluation
            mode. A plain value, since compiled code cannot follow the modules around a model.
    """

    def __init__(self, told_by: str = "", models: Sequence[nn.Module] = ()) -> None:
        self._told_by = told_by
        self.is_resizing = False
        self._handles = [model.register_forward_pre_hook(self, with_kwargs=True) for model in models]

    def __reduce__(self) -> tuple[Any, ...]:
        return Requirement, ()

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __call__(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        if not (self.is_resizing and torch.is_grad_enabled()):
            return
        given = {**dict(zip(forward_parameters(model), args, strict=False)), **kwargs}
        name = "cu_seq_lens_q" if self._told_by == "cu_seq_lens" else self._told_by
        if given.get(name) is None:
            raise ValueError(f"the model must get all entries of a resized batch; {name!r} is missing")
        if name != "window" and given.get("attention_mask") is not None:
            raise ValueError("attention_mask must be None under mode='segments', which it would undo, got a mask")
        if name == "position_ids" and given.get("past_key_values") is not None:
            raise ValueError("past_key_values must be None under mode='segments', which a cache would undo")
        if name == "position_ids" and given.get("use_cache") is not False and getattr(model.config, "use_cache", True):
            raise ValueError("use_cache must be False under mode='segments', which a cache would undo")
