"""A model whose inputs are resized on their way into its forward, while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..ops.resize_batch.schema import IGNORED_LABEL
from ..resizing.containers import is_container
from ..resizing.functional import resize_batch
from ..utils.modules import signature, unwrapped

if TYPE_CHECKING:
    from .scheduler import SequenceLengthScheduler

#: What Hugging Face's trainer divides a sum of losses by: labels of the whole batch, counted before they are cut.
_DIVISOR = "num_items_in_batch"


#: Where a model keeps its attachment.
_ATTRIBUTE = "_seqwarm_attachment"


class Seen(NamedTuple):
    """What a model was trained with since it was last asked."""

    tokens: int  #: after resizing; those that the attention mask has, or all without a mask
    samples: int  #: rows after resizing


class Attachment:
    """Made by `SequenceLengthScheduler.attach`: resizes what a model is called with while it is in training mode.

    Attributes:
        seq_length: of the last batch in training mode, after resizing; None before the first.
    """

    def __init__(self, model: nn.Module, scheduler: SequenceLengthScheduler, resize_options: Mapping[str, Any]) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
        if "return_info" in resize_options:
            raise TypeError("resize_options must not hold return_info: the attachment counts tokens by it")
        if _ATTRIBUTE in model.__dict__:
            raise ValueError("model has a scheduler attached already; call remove() of that attachment first")
        self.seq_length: int | None = None
        self._model = model
        self._scheduler = scheduler
        self._options = dict(resize_options)
        self._names = list(signature(model))
        self._tokens: list[Tensor] = []
        self._samples = 0
        self._compiled: Any = model._compiled_call_impl
        if self._compiled is None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)
        else:  # in front of the graph that `model.compile()` has made, which would take a hook into itself
            model._compiled_call_impl = self._resize_and_call
        model.__dict__[_ATTRIBUTE] = self

    def remove(self) -> None:
        """Leave the model as it was; a second time does nothing."""
        if self._model.__dict__.pop(_ATTRIBUTE, None) is None:
            return
        if self._compiled is None:
            self._handle.remove()
        else:
            self._model._compiled_call_impl = self._compiled

    def take_seen(self) -> Seen:
        """What went through the model since the last time. Waits for the device: ask once in an optimizer step."""
        seen = Seen(int(torch.stack(self._tokens).sum()) if self._tokens else 0, self._samples)
        self._tokens, self._samples = [], 0
        return seen

    def _resize_and_call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self(self._model, args, kwargs)
        return self._compiled(*args, **kwargs)

    @torch._disable_dynamo  # stays outside of a graph that is made later; the public name would import all of dynamo
    def __call__(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The hook: arguments in, resized arguments out."""
        if not model.training:
            return args, kwargs
        if len(args) == 1 and is_container(args[0]):  # a batch as a whole
            return (self._resized(args[0]),), kwargs
        names = [name for name, _ in zip(self._names, args, strict=False)]
        named = len(names) == len(args) and not set(names) & kwargs.keys()
        names = names if named else [str(index) for index in range(len(args))]
        inputs = dict(zip(names, args, strict=True)) | kwargs
        divisor = inputs.pop(_DIVISOR, None)
        resized = self._resized(inputs)
        if divisor is not None:
            first = 1 if _shifts_labels(model) else 0
            resized[_DIVISOR] = divisor * _kept_share(inputs.get("labels"), resized.get("labels"), first)
        return tuple(resized.pop(name) for name in names), resized

    def _resized(self, batch: Any) -> Any:
        result, info = resize_batch(batch, self._scheduler.seq_length, **self._options, return_info=True)
        self._tokens.append(info.num_valid_tokens)
        rows, self.seq_length = info.position_ids.shape
        self._samples += rows
        return result


def _shifts_labels(model: nn.Module) -> bool:
    """Whether a Hugging Face model's loss has none for the first label of a row, as causal language models'."""
    loss_type = getattr(unwrapped(model), "loss_type", None)
    return loss_type is None or "CausalLM" in str(loss_type)


def _kept_share(labels: Tensor | None, kept: Tensor | None, first: int) -> Tensor | float:
    """Of the labels that count, how many are left: 1 without labels, and where none counted."""
    if labels is None or kept is None:
        return 1.0
    count, count_kept = ((tensor[..., first:] != IGNORED_LABEL).sum() for tensor in (labels, kept))
    return torch.where(count > 0, count_kept / count, 1.0)
