"""Labels that an attached model does not get: they keep their length, while its inputs are cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..resizing.containers import flatten_batch
from ..resizing.entry_names import counts_as_label
from ..utils.caller_warnings import warn_caller

_OUTSIDE = (
    "the inputs of the model were cut to {} tokens, and it got no labels and returned no loss: labels outside of the "
    "model are not cut, so a loss of its outputs may compare tokens with labels of other tokens. Pass the labels to "
    "the model, or resize the whole batch with scheduler.resize(batch) instead of attaching, or with "
    "warmup.add_to(trainer) in Hugging Face's Trainer. A loss without labels, or with one label for each row, needs "
    "no change"
)


def has_labels(batch: Any) -> bool:
    """Whether a tensor of a batch is called as labels are."""
    return any(isinstance(value, Tensor) and counts_as_label(name) for name, value in flatten_batch(batch).items())


def warn_of_outside_labels(output: Any, seq_length: int | None) -> None:
    """Warn if a model that got no labels is trained by a loss that is computed from its output."""
    tensors = list(_tensors(output))
    has_loss = any(tensor.is_floating_point() and tensor.numel() == 1 for tensor in tensors)
    if not has_loss and any(tensor.requires_grad for tensor in tensors):
        warn_caller(_OUTSIDE.format(seq_length))


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, (list, tuple)):
        for value in output:
            yield from _tensors(value)
    elif dataclasses.is_dataclass(output):
        yield from _tensors(vars(output))


class OutputCheck:
    """A forward hook for one call of a model, with `warn_of_outside_labels`. Copies of the hook do nothing."""

    _handle: RemovableHandle | None = None
    _seq_length: int | None = None

    @classmethod
    def of_next_output(cls, model: nn.Module, seq_length: int | None) -> None:
        check = cls()
        check._handle, check._seq_length = model.register_forward_hook(check), seq_length

    @torch._disable_dynamo  # stays outside of a graph, as the attachment that made it
    def __call__(self, model: nn.Module, args: Any, output: Any) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
            warn_of_outside_labels(output, self._seq_length)

    def __reduce__(self) -> tuple[Any, ...]:
        return OutputCheck, ()  # a forward that raises leaves the hook, and the model may be copied or pickled
