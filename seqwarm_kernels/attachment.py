"""A model whose inputs are resized on their way into its forward, while it trains."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .batch import resize_batch
from .containers import is_container
from .wrappers import signature

#: What Hugging Face's trainer divides a sum of losses by: labels of the whole batch, counted before they are cut.
_DIVISOR = "num_items_in_batch"
_IGNORED_LABEL = -100


#: Where a model keeps its attachment.
_ATTRIBUTE = "_seqwarm_attachment"


class Seen(NamedTuple):
    """What a model was trained with since it was last asked."""

    tokens: int  #: after resizing; those that the attention mask has, or all without a mask
    samples: int  #: rows after resizing


class Attachment:
    """Made by `SequenceLengthScheduler.attach`: resizes what a model is called with while it is in training mode.

    Attributes:
        seq_length: what the last call in training mode was resized to; None before the first.
    """

    def __init__(self, model: nn.Module, length_now: Callable[[], int], resize_options: Mapping[str, Any]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if "return_info" in resize_options:
            raise TypeError("resize_options must not hold return_info: the attachment counts tokens by it")
        if _ATTRIBUTE in model.__dict__:
            raise ValueError("model has a scheduler attached already; call remove() of that attachment first")
        self._model = model
        self._length_now = length_now
        self._options = dict(resize_options)
        self._names = list(signature(model))
        self.seq_length: int | None = None
        self._tokens: list[Tensor] = []
        self._samples = 0
        self._detach = self._attach()
        model.__dict__[_ATTRIBUTE] = self

    def _attach(self) -> Callable[[], None]:
        """In front of the graph where `model.compile()` has made one, which would take a hook into itself."""
        model, compiled = self._model, self._model._compiled_call_impl
        if compiled is None:  # compiled later on, the hook stays outside of the graph
            hook = torch.compiler.disable(self._before_forward)
            return model.register_forward_pre_hook(hook, with_kwargs=True).remove

        def resize_and_call(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = self._before_forward(model, args, kwargs)
            return compiled(*args, **kwargs)

        model._compiled_call_impl = resize_and_call
        return lambda: setattr(model, "_compiled_call_impl", compiled)

    def remove(self) -> None:
        """Leave the model as it was; a second time does nothing."""
        if self._model.__dict__.pop(_ATTRIBUTE, None) is not None:
            self._detach()

    def take_seen(self) -> Seen:
        """What went through the model since the last time. Waits for the device: ask once in an optimizer step."""
        seen = Seen(int(torch.stack(self._tokens).sum()) if self._tokens else 0, self._samples)
        self._tokens, self._samples = [], 0
        return seen

    def _before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if not model.training:
            return args, kwargs
        length = self._length_now()
        if len(args) == 1 and is_container(args[0]):  # a batch as a whole
            return (self._resized(args[0], length),), kwargs
        names = [name for name, _ in zip(self._names, args, strict=False)]
        named = len(names) == len(args) and not set(names) & kwargs.keys()
        names = names if named else [str(index) for index in range(len(args))]
        inputs = dict(zip(names, args, strict=True)) | kwargs
        divisor = inputs.pop(_DIVISOR, None)
        resized = self._resized(inputs, length)
        if divisor is not None:
            resized[_DIVISOR] = divisor * _kept_share(inputs.get("labels"), resized.get("labels"))
        return tuple(resized.pop(name) for name in names), resized

    def _resized(self, batch: Any, length: int) -> Any:
        result, info = resize_batch(batch, length, **self._options, return_info=True)
        rows = len(info.valid_lengths)
        self._tokens.append(info.num_valid_tokens)
        self._samples += rows
        self.seq_length = length
        return result


def _kept_share(labels: Tensor | None, kept: Tensor | None) -> Tensor | float:
    """Of the labels that count, how many are left: 1 without labels, and where none counted."""
    if labels is None or kept is None:
        return 1.0
    count, count_kept = ((tensor[..., 1:] != _IGNORED_LABEL).sum() for tensor in (labels, kept))
    return torch.where(count > 0, count_kept / count, 1.0)
