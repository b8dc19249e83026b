"""`resize_batch` for one model, which gets the segments or the window of a batch that keeps its shape."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..utils.checks import is_dtensor
from ..utils.modules import (
    CACHE_NAMES,
    call_model,
    evaluation,
    forward_parameters,
    guess_batch,
    is_pretrained,
    shifts_labels,
)
from .functional import resize_batch
from .options import KEEPING_SHAPE

#: Parts of the names of attentions of transformers that read `cu_seq_lens_q`. Others read `position_ids`.
_OF_BOUNDARIES = ("flash", "seqwarm")
#: What models of transformers must get, by the entry that they read.
_NEEDED = {"position_ids": ["position_ids"], "cu_seq_lens": ["cu_seq_lens_q", "position_ids"], "window": ["window"]}
#: Tokens of the example by which a model is tested.
_TOKENS = 4


class ModelResizing:
    """What `resize_batch` does for one model: its options, the entries that the model takes, and those it must get.

    A model of transformers is run on four tokens, each in a segment of its own, to see whether it keeps them apart.
    Other models are trusted, and so is a forward that names `segment_length`.

    Args:
        options: Of `resize_batch`.
        by_rows: The model gets some rows of a batch at a time, as in `nn.DataParallel`, and cannot read boundaries over
            all rows.

    Attributes:
        options: With the `boundaries` that the model reads, and the labels that it uses.

    Raises:
        ValueError: The model reads no boundaries or window, or does not keep the tokens apart.
    """

    def __init__(self, model: nn.Module, options: Mapping[str, Any], *, by_rows: bool = False) -> None:
        self.options = dict(options)
        self._not_taken: list[str] = []  # of what these options add to a batch
        self._inner: list[Any] = []  # models of transformers
        self._own = forward_parameters(model)
        self._takes_all = any(each.kind == inspect.Parameter.VAR_KEYWORD for each in self._own.values())
        self._read: str | None = options.get("boundaries")  # or "window": what the model reads
        mode = options.get("mode")
        if mode not in KEEPING_SHAPE:
            return
        inner: list[Any] = _pretrained(model)
        by_rows |= isinstance(model, nn.DataParallel)
        if self._read is None:
            self._read = _chosen(mode, inner, self._own, by_rows)
        if self._read is None:
            needed = "window" if mode == "window" else "segment_length or cu_seq_lens_q"
            raise ValueError(
                f"mode={mode!r} needs a forward with {needed}, or a model of transformers, got {type(model).__name__}"
            )
        if by_rows and self._read == "cu_seq_lens":
            raise ValueError(f"boundaries must not be over all rows for {type(model).__name__}, got 'cu_seq_lens'")
        if mode == "segments":
            self.options["boundaries"] = self._read
            self.options.setdefault("keep_first_labels", not shifts_labels(next(iter(inner), model)))
        if inner and not (self._read == "segment_length" and "segment_length" in self._own):
            for each in inner:
                _check_apart(model if by_rows else each, each, self.options)
        if inner and self._read != "segment_length":
            self._inner = inner
        else:
            are_read = self._takes_all or self._read == "position_ids"
            names = ("use_cache",) if are_read else ("use_cache", "position_ids")
            self._not_taken = [name for name in names if name not in self._own]

    def strip(self, resized: Any, batch: Any) -> Any:
        """A resized batch without what was added to it and the model's forward does not take."""
        is_whole = not self._own.keys() & batch.keys()  # the forward takes the batch as one argument
        for name in self._not_taken:
            if name not in batch and not (is_whole and name == "position_ids"):
                resized.pop(name, None)
        return resized

    def check_taken(self, resized: Mapping[str, Any], inputs: Mapping[str, Any]) -> None:
        """Check that a forward with these inputs takes what was added to them."""
        missing = [name for name in resized if name not in inputs and name not in self._own]
        if missing and not self._takes_all:
            raise ValueError(f"the model's forward must take {missing[0]!r} under mode={self.options['mode']!r}")

    def require(self) -> Requirement:
        """What raises if a resized call does not pass to models of transformers what limits their attention."""
        return Requirement(self._read or "", self._inner)


def _chosen(mode: str, inner: Sequence[Any], own: Collection[str], by_rows: bool) -> str | None:
    """Where a model reads the limits of its attention: in an entry of its forward, or of its models of transformers.

    transformers has no public name of a model's attention.
    """
    if mode == "window":
        return "window" if inner or "window" in own else None
    if "segment_length" in own:
        return "segment_length"
    if "cu_seq_lens_q" in own:
        return "cu_seq_lens"
    attentions = [each.config._attn_implementation for each in inner]
    read = any(part in attention for attention in attentions for part in _OF_BOUNDARIES)
    return ("cu_seq_lens" if read and not by_rows else "position_ids") if inner else None


def _pretrained(model: nn.Module) -> list[nn.Module]:
    """The models of transformers in a model that are not parts of others."""
    if is_pretrained(model):
        return [model]
    return list(dict.fromkeys(inner for child in model.children() for inner in _pretrained(child)))


def _check_apart(model: nn.Module, inner: Any, options: Mapping[str, Any]) -> None:
    """Check that tokens which must not see the first one of a row have no gradient of its embedding.

    A gradient that must be 0 is 0, however small others are, and however experts round. `inner` is the model of
    transformers in `model`, by which the tokens are made.
    """
    mode, boundaries = options["mode"], options.get("boundaries")
    limits = f"segments by {boundaries}" if mode == "segments" else "a window"
    try:
        if inner.config.is_encoder_decoder:
            raise ValueError("it is an encoder and a decoder")
        tables = [each for name, each in inner.named_modules() if name.endswith("position_embeddings")]
        if mode == "segments" and any(getattr(each, "padding_idx", None) is not None for each in tables):
            raise ValueError("its positions begin after that of padding, as in RoBERTa")
        with evaluation(model), torch.enable_grad(), torch.compiler.set_stance("force_eager"):
            device = next(model.parameters()).device
            batch: Any = {**guess_batch(inner, 1, _TOKENS, device)}
            if model is inner:  # else its forward may need them
                batch.pop("labels", None)
            keys = [name for name, value in batch.items() if value.shape == (1, _TOKENS)]
            batch = resize_batch(batch, 1, mode=mode, boundaries=boundaries, keys=keys)
            embeddings: list[Tensor] = []
            hook = inner.get_input_embeddings().register_forward_hook(
                lambda module, args, output: embeddings.append(output.requires_grad_())
            )
            with _nothing_zero(model), hook:
                later = _output(call_model(model, batch))[:, 1:]
                (gradient,) = torch.autograd.grad(later, embeddings[0], torch.randn_like(later))
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be given {limits}: {error}") from error
    if gradient.view(_TOKENS, -1)[0].any():
        raise ValueError(f"{type(model).__name__} cannot be given {limits}: its tokens still see all tokens before")


def _output(output: Any) -> Tensor:
    """The logits, or the hidden states, of each token."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.shape[1:2] == (_TOKENS,)]
    found = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    if found is None:
        raise ValueError("its output has nothing for each token")
    return found


@contextmanager
def _nothing_zero(model: nn.Module) -> Iterator[None]:
    """Random values in parameters that are zero, as projections and gates begin: behind them no token sees another."""
    numbers = (each for each in model.parameters() if each.is_floating_point() and not is_dtensor(each))
    zero = [each for each in numbers if not each.any()]
    try:
        for parameter in zero:
            nn.init.normal_(parameter, std=0.02)
        torch.clear_autocast_cache()  # of parameters in another dtype
        yield
    finally:
        for parameter in zero:
            nn.init.zeros_(parameter)
        torch.clear_autocast_cache()


class Requirement:
    """A forward pre-hook of models. A wrapper or a `training_step` that picks entries would train on whole rows.

    That of a copied or pickled model requires nothing, since nothing is attached to it.

    Attributes:
        is_resizing: Whether the last call was resized. A model's `training` does not say it: it is loaded in evaluation
            mode. A plain value, since compiled code cannot follow the modules around a model.
    """

    def __init__(self, read: str = "", models: Sequence[nn.Module] = ()) -> None:
        self._read = read
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
        name = self._read
        missing = [entry for entry in _NEEDED[name] if given.get(entry) is None]
        if missing:
            raise ValueError(f"the model must get all entries of a resized batch; {missing[0]!r} is missing")
        if name != "window" and given.get("attention_mask") is not None:
            raise ValueError("attention_mask must be None under mode='segments', which it would undo, got a mask")
        cache = next((cache for cache in CACHE_NAMES if given.get(cache) is not None), None)
        if name == "position_ids" and cache is not None:
            raise ValueError(f"{cache} must be None under mode='segments', which a cache would undo")
        if name == "position_ids" and given.get("use_cache") is not False and getattr(model.config, "use_cache", True):
            raise ValueError("use_cache must be False under mode='segments', which a cache would undo")
